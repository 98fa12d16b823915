"""One file per kind of layer. A rule says what each row contributes to the gradient of the parameters it serves."""

from tacit.gradients.layers import _attention as _attention
from tacit.gradients.layers import _channel_norm as _channel_norm
from tacit.gradients.layers import _composed as _composed
from tacit.gradients.layers import _conv as _conv
from tacit.gradients.layers import _einsum as _einsum
from tacit.gradients.layers import _elementwise as _elementwise
from tacit.gradients.layers import _embedding as _embedding
from tacit.gradients.layers import _linear as _linear
from tacit.gradients.layers import _norm as _norm
from tacit.gradients.layers import _recurrent as _recurrent

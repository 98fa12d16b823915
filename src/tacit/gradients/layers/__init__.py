"""One file per kind of layer. A rule says what each row contributes to the gradient of the parameters it serves."""

from tacit.gradients.layers import _attention as attention
from tacit.gradients.layers import _conv as conv
from tacit.gradients.layers import _elementwise as bare
from tacit.gradients.layers import _embedding as embedding
from tacit.gradients.layers import _linear as linear
from tacit.gradients.layers import _norm as norm
from tacit.gradients.layers import _recurrent as recurrent

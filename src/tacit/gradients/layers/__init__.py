"""One file per kind of layer. A rule says what each row contributes to the gradient of the parameters it serves."""

from tacit.gradients.layers import attention, bare, conv, embedding, linear, norm, recurrent  # noqa: F401

"""Can tacit take this model, what would be trained, and which rule serves each layer?"""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass

from tacit.gradients import Engine
from tacit.models._loading import Loaded
from tacit.models._selection import select


@dataclass(frozen=True, kw_only=True)
class Compatibility:
    """What the gradient engine says of a model under a scheme.

    Args:
        name: The model's name.
        scheme: Which parameters would be trained.
        parameters: Of the whole model.
        trained: Parameter name -> size.
        rules: Parameter name -> the rule that serves it.
        remarks: What falls back to a slower path, and why.
    """

    name: str
    scheme: str
    parameters: int  # of the whole model
    trained: dict[str, int]  # parameter name -> size
    rules: dict[str, str]  # parameter name -> the rule that serves it
    remarks: tuple[str, ...]  # what falls back to a slower path, and why

    @property
    def trainable(self) -> int:
        return sum(self.trained.values())

    def by_rule(self) -> dict[str, tuple[int, int]]:
        """Rule -> how many parameters (tensors) it serves and how many numbers these hold."""
        tensors = Counter(self.rules[name] for name in self.trained)
        numbers: Counter[str] = Counter()
        for name, size in self.trained.items():
            numbers[self.rules[name]] += size
        return {rule: (tensors[rule], numbers[rule]) for rule in sorted(tensors, key=lambda r: -numbers[r])}


def check(loaded: Loaded, scheme: str = "full") -> Compatibility:
    """Check on synthetic rows whether a model can be trained with privacy, and which rule serves each parameter.

    Args:
        loaded: What `load` returned.
        scheme: Which parameters would be trained.

    Returns:
        What the gradient engine says.

    Raises:
        ValueError: It cannot; the message names the layer and the way out.

    Examples:
        >>> from tacit import models
        >>> report = models.check(models.load("small:convnet"), scheme="norms")
        >>> report.trainable < report.parameters
        True
    """
    model = loaded.model
    names = select(model, scheme)
    total = sum(parameter.numel() for parameter in model.parameters())  # with the adapters that a scheme inserts
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        engine = Engine(model, loaded.loss, clip=1.0)
        try:
            engine(loaded.batch)
        except (RuntimeError, TypeError, IndexError, AttributeError) as error:  # of the model itself, not of the engine
            reason = " ".join(str(error).split())[:200]
            raise ValueError(
                f"it does not take these rows ({type(error).__name__}: {reason}); give --input with the shape of one "
                "row, or a function that returns (model, batch)."
            ) from None
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    return Compatibility(
        name=loaded.name,
        scheme=scheme,
        parameters=total,
        trained={name: sizes[name] for name in names},
        rules={name: engine.served.get(name, "autograd") for name in names},
        remarks=tuple(str(w.message) for w in said if issubclass(w.category, UserWarning)),
    )

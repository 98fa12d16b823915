"""Private sampling: who takes part in a release, drawn as the release was charged; and what a model draws itself."""

from tacit.privacy.sampling._sampling import (
    draw,
    fresh_randomness,
    model_key,
    randomness,
    reading_key,
    reading_randomness,
    restored_generators,
    uniforms,
)

__all__ = [
    "draw",
    "fresh_randomness",
    "model_key",
    "randomness",
    "reading_key",
    "reading_randomness",
    "restored_generators",
    "uniforms",
]

"""Private sampling: who takes part in a release, drawn as the release was charged; and what a model draws itself."""

from tacit.privacy.sampling._sampling import draw, randomness, uniforms

__all__ = ["draw", "randomness", "uniforms"]

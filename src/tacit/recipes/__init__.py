"""Recipes: a life of a model as TOML, read into frozen dataclasses."""

from tacit.recipes._recipes import Progress, RecipeError, fingerprint, kind_of, nearest, plain, read, read_as

__all__ = ["Progress", "RecipeError", "fingerprint", "kind_of", "nearest", "plain", "read", "read_as"]

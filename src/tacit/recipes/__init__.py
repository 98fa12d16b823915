"""Recipes: settings of a run as TOML, read into frozen dataclasses."""

from tacit._deprecation import renamed_fields
from tacit.recipes._recipes import Progress, RecipeError, fingerprint, kind_of, nearest, plain, read, read_as

__all__ = ["Progress", "RecipeError", "fingerprint", "kind_of", "nearest", "plain", "read", "read_as", "renamed_fields"]

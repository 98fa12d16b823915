"""tacit: adapt models to private data without telling on anyone in it."""

__version__ = "0.1.0"

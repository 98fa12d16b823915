"""Where a Flower project finds the server app: ``tacit.calibrate.federated.server:app``."""

from tacit.calibrate.federated._server import app

__all__ = ["app"]

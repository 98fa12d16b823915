"""Where a Flower project finds the client app: ``tacit.calibrate.federated.client:app``."""

from tacit.calibrate.federated._client import app

__all__ = ["app"]

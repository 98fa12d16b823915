"""Sources on other machines, reached through Flower: the same questions and answers as within one process.

The apps live in ``federated.server:app`` and ``federated.client:app``. A Flower project names them and holds no code
of its own, so what runs beside the data is the tacit that is installed there.
"""

try:
    import flwr as _flwr
except ImportError:
    raise ImportError(
        "Sources on other machines are reached through Flower, which is not installed: pip install 'tacit[federated]'."
    ) from None

from tacit.calibrate.federated._client import SourceSettings, client_app
from tacit.calibrate.federated._server import RunSettings, server_app
from tacit.calibrate.federated._service import CalibrationService, ServiceError
from tacit.calibrate.federated._transport import FlowerTransport

__all__ = [
    "CalibrationService",
    "FlowerTransport",
    "RunSettings",
    "ServiceError",
    "SourceSettings",
    "client_app",
    "server_app",
]

del _flwr

"""Ray on a machine that is busy with other things: it waits longer before it gives up."""

import time
from collections.abc import Callable
from typing import Any

import pytest

_PATIENCE = 600.0  # seconds
# Read by every process of Ray when it starts. Its workers run at niceness 15 by default, which on a machine with more
# work than cores hardly ever get a turn.
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "RAY_worker_register_timeout_seconds": "600",
    "RAY_agent_register_timeout_ms": "600000",
    "RAY_gcs_server_port_wait_time_s": "600",
    "RAY_gcs_rpc_server_connect_timeout_s": "600",
    "RAY_gcs_server_request_timeout_seconds": "600",
    "RAY_health_check_timeout_ms": "120000",
    "RAY_health_check_failure_threshold": "20",
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "600",
    "OMP_NUM_THREADS": "1",
}


def be_patient(patch: pytest.MonkeyPatch) -> Any:
    """Ray, with limits of ten minutes. That of a node's own start is 30 s and has no setting: its question is asked on.

    Args:
        patch: Undoes it.

    Returns:
        The module `ray`.
    """
    for name, value in _ENVIRONMENT.items():
        patch.setenv(name, value)
    import ray
    from ray._private import services

    real: Callable[..., Any] = services.get_node

    def asked_on(*where: Any) -> Any:
        last = time.monotonic() + _PATIENCE
        while True:
            try:
                return real(*where)
            except RuntimeError:
                if time.monotonic() > last:
                    raise
                time.sleep(0.5)

    patch.setattr(services, "get_node", asked_on)
    return ray

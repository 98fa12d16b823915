"""Running a service under uvicorn: TLS by configuration, no token over an open network by accident."""

from __future__ import annotations

import logging
from ipaddress import ip_address
from pathlib import Path

from fastapi import FastAPI

_IDLE = 75  # seconds before a connection is closed; with uvicorn's 5, as httpx's, a request could meet its closing


def run_service(
    app: FastAPI,
    *,
    host: str = "127.0.0.1",
    port: int = 8433,
    certificate: Path | None = None,
    key: Path | None = None,
    behind_proxy: bool = False,
) -> None:
    """Serve until it is stopped; a running request ends first.

    Args:
        app: The application.
        host: The address to listen on.
        port: The port.
        certificate: A TLS certificate (chain) in PEM.
        key: Its private key.
        behind_proxy: A proxy in front of it ends TLS: plain HTTP is served beyond this machine.

    Raises:
        ValueError: Tokens would cross a network unencrypted, or the certificate is incomplete.
    """
    import uvicorn

    if (certificate is None) != (key is None):
        raise ValueError("TLS needs both a certificate and its key.")
    for file in (certificate, key):
        if file is not None and not file.is_file():
            raise ValueError(f"There is no file {file}.")
    if certificate is None and not behind_proxy and not _loopback(host):
        raise ValueError(
            f"Tokens would cross the network unencrypted on {host}: give a certificate and its key, or say that a "
            "proxy in front of it ends TLS (behind_proxy)."
        )
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    uvicorn.run(
        app,
        host=host,
        port=port,
        ssl_certfile=certificate,
        ssl_keyfile=key,
        access_log=False,
        log_level="warning",
        server_header=False,
        proxy_headers=behind_proxy,
        timeout_graceful_shutdown=30,
        timeout_keep_alive=_IDLE,
    )


def _loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

"""Who may ask."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.datastructures import Headers

from starsd_edge.endpoint.guard import Guard
from starsd_edge.endpoint.server import Tls, check_exposure, open_socket
from starsd_edge.errors import ConfigError, ResourceError

TLS = Tls(Path("cert.pem"), Path("key.pem"))


@pytest.mark.parametrize(
    ("status", "guard", "headers"),
    [
        (None, Guard(), {"host": "127.0.0.1:8642"}),
        (None, Guard(), {"host": "localhost"}),
        (None, Guard(), {"host": "[::1]:8642"}),
        (403, Guard(), {"host": "evil.example:8642"}),
        (403, Guard(), {}),
        (403, Guard(), {"host": "localhost", "origin": "https://evil.example"}),
        (None, Guard(origins=["https://ui.example"]), {"host": "localhost", "origin": "https://ui.example"}),
        (401, Guard("sesame"), {"host": "device.lan"}),
        (401, Guard("sesame"), {"host": "device.lan", "authorization": "Bearer open"}),
        (401, Guard("sesame"), {"host": "device.lan", "authorization": "Basic sesame"}),
        (401, Guard("sesame"), {"host": "device.lan", "authorization": "Bearer sésame"}),
        (None, Guard("sesame"), {"host": "device.lan", "authorization": "Bearer sesame"}),
        (403, Guard("sesame"), {"origin": "https://evil.example", "authorization": "Bearer sesame"}),
    ],
)
def test_who_is_let_in(status: int | None, guard: Guard, headers: dict[str, str]) -> None:
    refusal = guard.refuse(Headers(headers))
    assert status == (None if refusal is None else refusal.status)


@pytest.mark.parametrize(
    ("host", "api_key", "tls"),
    [("127.0.0.1", "", None), ("::1", "", None), ("localhost", "", None), ("0.0.0.0", "key", TLS)],
)
def test_addresses_that_are_safe(host: str, api_key: str, tls: Tls | None) -> None:
    check_exposure(host, api_key, tls)


@pytest.mark.parametrize(
    ("missing", "host", "api_key", "tls"),
    [
        ("API key", "0.0.0.0", "", TLS),
        ("certificate", "192.168.1.5", "key", None),
        ("API key .* and a certificate", "::", "", None),
    ],
)
def test_others_need_a_key_and_encryption(missing: str, host: str, api_key: str, tls: Tls | None) -> None:
    with pytest.raises(ConfigError, match=missing):
        check_exposure(host, api_key, tls)


def test_a_port_in_use_is_one_clear_error() -> None:
    with open_socket("127.0.0.1", 0) as first:
        first.listen()
        with pytest.raises(ResourceError, match="choose another --port"):
            open_socket("127.0.0.1", first.getsockname()[1])

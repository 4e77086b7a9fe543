"""What `starsd draft serve` makes of its options."""

from __future__ import annotations

import pytest

from starsd_server.cli_serve import monitor_endpoint


@pytest.mark.parametrize(
    ("expected", "bind", "monitor"),
    [
        ("tcp://127.0.0.1:7732", "tcp://127.0.0.1:7731", None),
        ("tcp://[::1]:7732", "tcp://[::1]:7731", None),
        ("", "tcp://127.0.0.1:0", None),
        ("", "tcp://127.0.0.1:65535", None),
        ("", "ipc:///run/starsd/draft", None),
        ("", "tcp://127.0.0.1:7731", "none"),
        ("tcp://127.0.0.1:9000", "tcp://127.0.0.1:7731", "tcp://127.0.0.1:9000"),
    ],
)
def test_monitor_is_published_beside_the_service_unless_told_otherwise(
    expected: str, bind: str, monitor: str | None
) -> None:
    assert expected == monitor_endpoint(bind, monitor)

"""What people write for the address of a service."""

from __future__ import annotations

import pytest

from starsd_edge.errors import UsageError
from starsd_edge.link.address import bind_address, draft_address, monitor_address, monitor_of


@pytest.mark.parametrize(
    ("written", "drafts", "watched"),
    [
        ("desk", "tcp://desk:7731", "tcp://desk:7732"),
        ("tcp://desk", "tcp://desk:7731", "tcp://desk:7732"),
        ("desk:9000", "tcp://desk:9000", "tcp://desk:9000"),
        ("tcp://192.0.2.2:9000", "tcp://192.0.2.2:9000", "tcp://192.0.2.2:9000"),
        ("::1", "tcp://[::1]:7731", "tcp://[::1]:7732"),
        ("[::1]", "tcp://[::1]:7731", "tcp://[::1]:7732"),
        ("tcp://[::1]:9000", "tcp://[::1]:9000", "tcp://[::1]:9000"),
        ("ipc:///run/x.sock", "ipc:///run/x.sock", "ipc:///run/x.sock"),
    ],
)
def test_host_port_and_scheme_may_be_left_out(written: str, drafts: str, watched: str) -> None:
    assert (draft_address(written), monitor_address(written)) == (drafts, watched)


@pytest.mark.parametrize(
    "written",
    [
        "",
        ":7731",
        "desk:",
        "desk:0",
        "desk:65536",
        "desk:99999",
        "desk:x",
        "desk:²",
        "http://desk",
        "tcp://",
        "a/b",
    ],
)
def test_what_is_no_address_is_refused_with_what_is_one(written: str) -> None:
    with pytest.raises(UsageError, match="HOST:PORT"):
        draft_address(written)


def test_the_monitor_is_at_the_next_port() -> None:
    assert monitor_of("desk") == "tcp://desk:7732"
    assert monitor_of("tcp://desk:9000") == "tcp://desk:9001"
    with pytest.raises(UsageError, match="its monitor"):
        monitor_of("ipc:///run/x.sock")


def test_a_service_may_take_any_free_port() -> None:
    assert bind_address("tcp://127.0.0.1:0") == "tcp://127.0.0.1:0"
    assert bind_address("tcp://*:7731") == "tcp://*:7731"
    with pytest.raises(UsageError, match="port 0 to 65535"):
        bind_address("tcp://127.0.0.1:99999")

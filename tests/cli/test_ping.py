"""`starsd ping` against a real service on loopback, and against everything that is none."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from starsd_edge.cli.ping import command
from starsd_edge.errors import AuthenticationError, ConfigError, StarSDError, UnreachableError, UsageError
from starsd_edge.link.keys import KeyPair
from starsd_edge.link.ping import BANDWIDTH_PINGS
from starsd_edge.link.pins import Pin, pin_service
from starsd_edge.protocol.codec import encode
from starsd_edge.protocol.limits import MAX_PING_PADDING_BYTES
from starsd_edge.protocol.messages import Error, ErrorCode, Head
from tests.core.link.loopback import LoopbackService


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STARSD_KEYS", str(tmp_path))
    return tmp_path


@pytest.fixture
def service() -> Iterator[LoopbackService]:
    service = LoopbackService()
    yield service
    service.stop()


def ping(*arguments: str) -> str:
    quick = ["--count", "3", "--interval", "0", *arguments]
    result = CliRunner().invoke(command, quick, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_round_trip_is_split_and_summed_up(service: LoopbackService) -> None:
    report = json.loads(ping(service.address, "--json"))
    assert (report["sent"], report["lost"], report["loss"]) == (3, 0, 0)
    assert 0 < report["link"]["p50_s"] <= report["round_trip"]["p50_s"] <= report["round_trip"]["p99_s"]
    assert report["upload_bytes_per_s"] > 0


def test_the_table_is_for_people(service: LoopbackService) -> None:
    output = ping(service.address)
    assert output.count("= link") == 3
    assert "0 of 3 lost, up" in output
    assert "; the probes took " in output


def test_probes_are_few_and_their_bytes_are_told(service: LoopbackService) -> None:
    """Without the upload a ping is a header and a number; with it, eight padded ones more."""
    small = json.loads(ping(service.address, "--json", "--no-upload"))["probe_bytes"]
    large = json.loads(ping(service.address, "--json"))["probe_bytes"]
    assert 0 < small < 3 * 200
    assert large == pytest.approx(small + BANDWIDTH_PINGS * MAX_PING_PADDING_BYTES, abs=BANDWIDTH_PINGS * 200)


def test_an_encrypted_service_is_pinged_with_the_devices_key(folder: Path) -> None:
    server, device = KeyPair.generate("service"), KeyPair.generate("device")
    device.save(folder / "device.key")
    service = LoopbackService(server, {device.key.public: "jet1"}.get)
    try:
        assert "0 of 3 lost" in ping(service.address, "--service-key", server.key.public)
        with pytest.raises(AuthenticationError, match="does not hold the draft service's key"):
            ping(service.address, "--service-key", KeyPair.generate("x").key.public)
        with pytest.raises(ConfigError, match="key is not known here"):
            ping(service.address)
    finally:
        service.stop()


def test_a_service_is_pinged_by_the_name_it_is_pinned_under(folder: Path) -> None:
    server, device = KeyPair.generate("service"), KeyPair.generate("device")
    device.save(folder / "device.key")
    service = LoopbackService(server, {device.key.public: "jet1"}.get)
    try:
        pin_service(folder, Pin("desk", server.key.public, service.address))
        assert "0 of 3 lost" in ping("desk")
    finally:
        service.stop()


def test_a_mistyped_name_is_not_taken_for_an_unknown_key(folder: Path) -> None:
    KeyPair.generate("device").save(folder / "device.key")
    pin_service(folder, Pin("desk", KeyPair.generate("service").key.public, "desk.example:7731"))
    with pytest.raises(UsageError, match=r"no host is called no-such-desk.*\(desk\)"):
        ping("no-such-desk")


def test_a_device_nobody_trusts_is_told_so(folder: Path) -> None:
    server, device = KeyPair.generate("service"), KeyPair.generate("device")
    device.save(folder / "device.key")
    service = LoopbackService(server, {}.get)
    try:
        with pytest.raises(AuthenticationError, match=device.key.fingerprint):
            ping(service.address, "--service-key", server.key.public)
    finally:
        service.stop()


def test_a_key_that_is_revoked_meanwhile_is_told(
    service: LoopbackService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It went on as if nothing were heard."""
    revoked = encode(Error(Head(0), ErrorCode.REVOKED, "not trusted any more"))
    monkeypatch.setattr(service.core, "receive", lambda *_: [revoked])
    with pytest.raises(AuthenticationError, match=f"{service.address}: not trusted any more"):
        ping(service.address)


def test_nobody_there_is_told_within_seconds() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        with pytest.raises(UnreachableError, match="nothing listens"):
            ping(address)


def test_a_hung_engine_is_not_taken_for_a_working_one(service: LoopbackService) -> None:
    service.hang.set()
    with pytest.raises(UnreachableError, match="is the engine hung"):
        ping(service.address, "--timeout", "0.05")


@pytest.mark.parametrize("address", ["", "here", "tcp://192.0.2.1:7700"])
def test_what_is_no_address_or_lacks_keys_is_refused(address: str) -> None:
    with pytest.raises((ConfigError, StarSDError)):
        ping(address)

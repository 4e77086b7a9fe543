"""Strangers at the door are told of, and cannot make the service remember or write without end."""

from __future__ import annotations

import logging

import pytest

from starsd_edge.link.keys import KeyPair
from starsd_edge.link.zap import Knock
from starsd_server.refusals import MAX_LINES, MAX_PEERS, WINDOW_S, Refusals

STRANGER = KeyPair.generate("x").key


def knock(reason: str = "unknown key", public: str = STRANGER.public) -> Knock:
    return Knock(public, "192.0.2.7", None, reason)


def test_a_stranger_is_told_of_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals()
    for now_s in (1.0, 2.0, 100.0):
        refusals.note(knock(), now_s)
    assert [f"refused {STRANGER.fingerprint} from 192.0.2.7: unknown key"] == caplog.messages
    (peer,) = refusals.peers(103.0)
    assert (STRANGER.fingerprint, 3, 3.0) == (peer.fingerprint, peer.times, peer.quiet_s)


def test_another_reason_is_told_as_well(caplog: pytest.LogCaptureFixture) -> None:
    """A device that was revoked and trusted again, and now has too many connections."""
    refusals = Refusals()
    refusals.note(knock(), 1.0)
    refusals.note(knock("jet1 has as many connections as it may"), 2.0)
    assert "as many connections" in caplog.messages[1]
    (peer,) = refusals.peers(2.0)
    assert ("jet1 has as many connections as it may", 2) == (peer.reason, peer.times)


def test_a_peer_without_a_key_has_a_name(caplog: pytest.LogCaptureFixture) -> None:
    Refusals().note(Knock("", "192.0.2.7", None, "no CURVE key"), 0.0)
    assert ["refused no key from 192.0.2.7: no CURVE key"] == caplog.messages


def test_one_who_comes_with_a_new_key_each_time_fills_neither_memory_nor_disk(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    refusals = Refusals()
    keys = [KeyPair.generate("x").key for _ in range(3 * MAX_PEERS)]
    for number, key in enumerate(keys):
        refusals.note(knock(public=key.public), number * WINDOW_S / len(keys))
    assert MAX_LINES == len(caplog.messages)
    assert [key.fingerprint for key in keys[-MAX_PEERS:]] == [
        peer.fingerprint for peer in refusals.peers(0.0)
    ]
    caplog.clear()
    refusals.look(WINDOW_S)
    refusals.look(WINDOW_S)
    assert [f"refused {len(keys) - MAX_LINES} others within {WINDOW_S:.0f} s"] == caplog.messages
    refusals.note(knock(), WINDOW_S)
    assert 2 == len(caplog.messages)

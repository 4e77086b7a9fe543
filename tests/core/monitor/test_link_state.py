"""Each story is what ZeroMQ and the probe reported in such a case, and what the user is told at its end."""

import pytest

from starsd_edge.monitor.link_state import HUNG_AFTER_S, Link, LinkEvent, LinkState, after

E, S = LinkEvent, LinkState


@pytest.mark.parametrize(
    ("story", "state"),
    [
        ([], S.CONNECTING),
        ([E.HANDSHAKE_DONE, E.SNAPSHOT], S.UP),
        ([E.KEY_DENIED, E.DISCONNECTED], S.UNKNOWN_KEY),
        ([E.HANDSHAKE_BROKEN, E.DISCONNECTED, E.RETRYING], S.OTHER_SERVICE),
        ([E.HANDSHAKE_MISFIT, E.DISCONNECTED], S.NOT_ENCRYPTED),
        ([E.DISCONNECTED], S.OTHER_PROGRAM),
        ([E.DISCONNECTED, E.HANDSHAKE_DONE, E.SNAPSHOT], S.UP),
        ([E.HANDSHAKE_DONE, E.DISCONNECTED], S.CONNECTING),
        ([E.RETRYING, E.PROBE_REFUSED, E.RETRYING], S.SERVER_DOWN),
        ([E.RETRYING, E.PROBE_UNREACHED, E.RETRYING], S.NO_ROUTE),
        ([E.SNAPSHOT, E.DISCONNECTED], S.CONNECTING),
        ([E.SNAPSHOT, E.DISCONNECTED, E.RETRYING, E.PROBE_REFUSED], S.SERVER_DOWN),
        ([E.PROBE_REFUSED, E.HANDSHAKE_DONE, E.SNAPSHOT], S.UP),
        ([E.HANDSHAKE_TIMED_OUT, E.DISCONNECTED, E.RETRYING], S.HUNG),
        ([E.HANDSHAKE_TIMED_OUT, E.DISCONNECTED, E.HANDSHAKE_DONE, E.SNAPSHOT], S.UP),
        ([E.HANDSHAKE_TIMED_OUT, E.DISCONNECTED, E.RETRYING, E.PROBE_REFUSED], S.SERVER_DOWN),
        ([E.SNAPSHOT, E.KEY_DENIED, E.DISCONNECTED], S.UNKNOWN_KEY),
        ([E.KEY_DENIED, E.HANDSHAKE_DONE, E.SNAPSHOT], S.UP),
        ([E.KEY_FULL, E.DISCONNECTED], S.TOO_MANY),
        ([E.SNAPSHOT, E.END], S.ENDED),
    ],
)
def test_the_reason_stays_visible_until_it_is_gone(story: list[LinkEvent], state: LinkState) -> None:
    link = Link()
    for now_s, event in enumerate(story):
        link = after(link, event, float(now_s))
    assert link.state is state


def test_a_connection_that_stands_and_says_nothing_is_a_service_that_hangs() -> None:
    link = after(Link(), E.SNAPSHOT, 10.0)
    assert after(link, E.TICK, 10.0 + HUNG_AFTER_S).state is S.UP
    assert after(link, E.TICK, 10.1 + HUNG_AFTER_S).state is S.HUNG


def test_a_service_that_never_published_hangs_too() -> None:
    link = after(Link(), E.HANDSHAKE_DONE, 0.0)
    assert after(link, E.TICK, 5.0).state is S.HUNG


def test_waiting_for_a_connection_is_not_hanging() -> None:
    link = after(after(Link(), E.SNAPSHOT, 0.0), E.DISCONNECTED, 1.0)
    assert after(link, E.TICK, 100.0).state is S.CONNECTING


def test_a_state_remembers_since_when() -> None:
    link = Link()
    for now_s, event in [(1.0, E.RETRYING), (2.0, E.PROBE_REFUSED), (7.0, E.PROBE_REFUSED)]:
        link = after(link, event, now_s)
    assert (link.state, link.since_s) == (S.SERVER_DOWN, 2.0)


@pytest.mark.parametrize("state", [s for s in LinkState if s not in (S.UP, S.CONNECTING)])
def test_every_state_that_is_not_well_says_what_to_do(state: LinkState) -> None:
    assert Link(state).advice

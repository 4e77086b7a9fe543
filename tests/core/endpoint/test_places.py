"""Whose connection makes room for whose."""

from __future__ import annotations

import pytest

from starsd_edge.endpoint.places import Places, party


def everybody(_: str) -> bool:
    return True


def full(*owners: str) -> Places[str]:
    """One connection of each owner, `owner/index`, the oldest first."""
    places: Places[str] = Places(len(owners))
    for index, owner in enumerate(owners):
        places.take(f"{owner}/{index}", owner)
    return places


@pytest.mark.parametrize(
    ("yields", "newcomer", "owners"),
    [
        ("a/0", "b", "aa"),
        ("a/1", "c", "baaba"),  # the party with most, and of that the oldest
        (None, "a", "aaaa"),  # nobody takes from himself
        (None, "b", "aab"),  # it would be the other way round then
        ("a/0", "b", "aaab"),
        (None, "c", "ab"),
    ],
)
def test_the_party_with_most_yields_to_one_with_fewer(yields: str | None, newcomer: str, owners: str) -> None:
    assert full(*owners).who_yields(newcomer, everybody) == yields


def test_only_those_yield_on_which_nothing_is_asked() -> None:
    places = full(*"aaabb")
    assert places.who_yields("c", lambda holder: holder in ("a/2", "b/4")) == "a/2"
    assert places.who_yields("c", lambda holder: holder == "b/4") == "b/4"
    assert places.who_yields("c", lambda holder: False) is None


def test_whoever_has_gone_holds_no_place() -> None:
    places = full(*"ab")
    assert places.is_full
    places.keep({"b/1"})
    assert not places.is_full
    places.leave("b/1")
    places.take("a/0", "a")
    assert not places.is_full


@pytest.mark.parametrize(
    ("same", "one", "other"),
    [
        (True, "10.0.0.1", "::ffff:10.0.0.1"),
        (False, "10.0.0.1", "10.0.0.2"),
        (True, "2001:db8::1", "2001:db8::ffff:1"),
        (True, "fe80::1%eth0", "fe80::2"),
        (False, "2001:db8::1", "2001:db8:0:1::1"),
        (True, "name", "name"),
    ],
)
def test_addresses_of_one_party(same: bool, one: str, other: str) -> None:
    assert (party(one) == party(other)) is same

"""Peers of `starsd bench e2e`: every way of decoding says the same greedy text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from starsd_edge.cli import bench_peers
from starsd_edge.errors import MissingDependencyError


def test_transformers_says_the_same_plain_with_lookup_and_assisted(
    tiny: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_peers, "ASSISTANT_LAYERS", 1)
    ways = bench_peers.open_peer("transformers", tiny("llama grouped").folder, frozenset({0}), None)
    assert list(ways) == ["transformers", "transformers lookup", "transformers assisted"]
    plain, *others = (way([5, 6, 7, 5, 6], 12) for way in ways.values())
    assert len(plain.tokens) == 12
    assert all(other.tokens == plain.tokens for other in others)
    assert plain.first_token_s is None  # it does not tell


def test_a_peer_that_is_not_installed_is_named(
    tiny: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(bench_peers.PEERS, "other", ("no_such_package", bench_peers.transformers))
    with pytest.raises(MissingDependencyError, match="no_such_package: it is not installed"):
        bench_peers.open_peer("other", tiny("llama grouped").folder, frozenset(), None)

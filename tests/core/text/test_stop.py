"""Stop strings against a reading of one character at a time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starsd_edge.errors import UsageError
from starsd_edge.text.stop import StopFilter

letters = st.text("ab<\n", max_size=12)


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(pieces=st.lists(letters), stops=st.lists(letters.filter(bool), max_size=3))
def test_any_split_gives_the_naive_result(pieces: list[str], stops: list[str]) -> None:
    stop_filter = StopFilter(stops)
    shown = "".join(stop_filter.push(piece) for piece in pieces) + stop_filter.flush()
    assert naive("".join(pieces), stops) == (shown, stop_filter.matched)


@given(pieces=st.lists(letters), stops=st.lists(letters.filter(bool), min_size=1, max_size=3))
def test_no_beginning_of_a_stop_string_is_shown_that_could_still_become_one(
    pieces: list[str], stops: list[str]
) -> None:
    """Whatever was shown stays right for every continuation, so also for those that complete a stop."""
    stop_filter, shown, read = StopFilter(stops), "", ""
    for piece in pieces:
        shown += stop_filter.push(piece)
        read += piece
        for stop in stops:
            for size in range(1, len(stop)):
                assert naive(read + stop[size:], stops)[0].startswith(shown)


@given(text=letters)
def test_without_stop_strings_nothing_is_kept_back(text: str) -> None:
    assert text == StopFilter().push(text)


def test_a_stop_across_pieces_does_not_leak() -> None:
    stop_filter = StopFilter(["\nUSER:"])
    assert ["Hello", "", "", ""] == [stop_filter.push(piece) for piece in ("Hello\n", "US", "ER", ": hi")]
    assert "\nUSER:" == stop_filter.matched


def test_a_beginning_that_turns_out_harmless_is_shown() -> None:
    stop_filter = StopFilter(["\nUSER:"])
    assert ["Hello", "\nUSA"] == [stop_filter.push(piece) for piece in ("Hello\nUS", "A")]


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(UsageError, match="empty"):
        StopFilter([""])

"""Stop strings in streamed text: cut where one ends, never leak the beginning of one.

Defined so that the way a text is split into pieces cannot matter: reading one character at a time, the
first position where any stop string is complete ends the text; of the strings that end there the longest
counts, and the text ends where it begins.
"""

from __future__ import annotations

from collections.abc import Sequence

from starsd_edge.errors import UsageError

__all__ = ["StopFilter"]


class StopFilter:
    """Passes text through until a stop string is complete; keeps back what may still become one."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        if not all(stops):
            raise UsageError("a stop string must not be empty")
        self._stops = tuple(dict.fromkeys(stops))
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text; None while it goes on."""
        return self._matched

    def push(self, text: str) -> str:
        """What may be shown after `text` arrived; empty once a stop string matched."""
        if self._matched is not None:
            return ""
        window = self._held + text
        for end in range(len(self._held) + 1, len(window) + 1):
            found = [stop for stop in self._stops if window.endswith(stop, 0, end)]
            if found:
                self._matched = max(found, key=len)
                self._held = ""
                return window[: end - len(self._matched)]
        keep = max((_overlap(window, stop) for stop in self._stops), default=0)
        self._held = window[len(window) - keep :]
        return window[: len(window) - keep]

    def flush(self) -> str:
        """The text ended: what was kept back was no stop string after all."""
        held, self._held = self._held, ""
        return held


def _overlap(window: str, stop: str) -> int:
    """Length of the longest end of `window` that is a proper beginning of `stop`."""
    longest = min(len(window), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if window.endswith(stop[:size])), 0)

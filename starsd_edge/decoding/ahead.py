"""Whether to have trees drafted ahead: learnt from what they were worth when it came to it.

A tree that was drafted ahead goes on where the verified one ended, so a round that it is good for waits for
nothing. Its nodes are guesses upon guesses, whose acceptance is learnt apart. docs/policy.md has the model.
"""

from __future__ import annotations

from starsd_edge.decoding.acceptance import AcceptanceModel

__all__ = ["AHEAD_NODES", "DraftingAhead"]

AHEAD_NODES = 250  # of at most 256; each is three bytes or five
# What it brings is an average over about the last 20 rounds, and is believed after TRIAL_ROUNDS. Below
# LEAST_GAIN of the speed it is not worth its bytes and the processor's time, and is asked for no more. It is
# tried again after so many rounds, twice as many each time.
SMOOTHING = 0.05
TRIAL_ROUNDS = 24
LEAST_GAIN = 0.01
FIRST_PAUSE = 64
LAST_PAUSE = 1024


class DraftingAhead:
    """What is known of one drafter's trees drafted ahead."""

    def __init__(self) -> None:
        self.acceptance = AcceptanceModel()
        self.wanted = True
        self._rounds = 0  # since it was last switched
        self._pause = FIRST_PAUSE
        self._tokens = 1.0  # a round, and of these
        self._saved = 0.0  # what the time that was not spent waiting is worth
        self._of_round = 0.0

    @property
    def gain(self) -> float:
        """Speed that it adds, over the speed without."""
        return self._saved / max(self._tokens - self._saved, 1.0) if self.wanted else 0.0

    def used(self, saved: float) -> None:
        """A tree drafted ahead is about to be verified; it is worth `saved` tokens more than the best there
        was to do without it."""
        self._of_round = max(0.0, saved)

    def observe(self, tokens: int) -> None:
        """A round ended."""
        self._tokens += SMOOTHING * (tokens - self._tokens)
        self._saved += SMOOTHING * (self._of_round - self._saved)
        self._of_round = 0.0
        self._rounds += 1
        if self.wanted and self._rounds >= TRIAL_ROUNDS:
            if self.gain >= LEAST_GAIN:
                self._pause = FIRST_PAUSE
            else:
                self._switch()
        elif not self.wanted and self._rounds >= self._pause:
            self._switch()
            self._pause = min(2 * self._pause, LAST_PAUSE)

    def _switch(self) -> None:
        self.wanted, self._rounds = not self.wanted, 0

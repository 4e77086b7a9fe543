"""Contexts: KV caches of conversations, as many as memory allows, each with its own decode loop.

A prompt goes to the context that holds the longest beginning of it. One that shares little (a system message
and no more) gets a context of its own; when there is no room for another, the one unused for longest is
overwritten.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from starsd_edge.chat.recorder import Recorder
from starsd_edge.chat.switch import SwitchedPolicy
from starsd_edge.decoding.decoder import Decoder, Exactness
from starsd_edge.decoding.policy import Policy
from starsd_edge.decoding.prefix import common_length
from starsd_edge.decoding.roles import Drafter, Target
from starsd_edge.types import TokenArray

__all__ = ["Context", "ContextPool", "Pair"]

# A context is continued when at least this share of what it holds begins the prompt: an edit of the last
# turns continues a conversation, a common system message does not.
CONTINUED_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Pair:
    """A target with an empty cache, the draft service's drafter (None where none was named), and the policy
    between them."""

    target: Target
    drafter: Drafter | None
    policy: Policy
    exactness: Exactness = Exactness.EXACT

    @property
    def is_exact_enough(self) -> bool:
        """Whether trees may be verified at all."""
        return self.exactness is Exactness.INEXACT or self.target.spec.invariance.exact_tree


class Context:
    """One KV cache and what decodes on it. `drafter` is the draft service's."""

    def __init__(self, pair: Pair, clock: Callable[[], float]) -> None:
        self.recorder = Recorder(pair.target)
        self.switch = SwitchedPolicy(pair.policy)
        self.drafter = pair.drafter
        self.verifies_trees = pair.is_exact_enough
        self.decoder = Decoder(self.recorder, pair.drafter, self.switch, clock, pair.exactness)

    def close(self) -> None:
        if self.drafter is not None:
            self.drafter.close()

    def shared(self, tokens: TokenArray) -> int:
        """How many leading tokens of a prompt it holds."""
        return common_length(self.decoder.prefix, tokens)


class ContextPool:
    """Opens contexts when they are needed, at most `limit`.

    open_pair  makes a pair; called in the thread that answers
    """

    def __init__(self, open_pair: Callable[[], Pair], limit: int, clock: Callable[[], float]) -> None:
        if limit < 1:
            raise ValueError(f"at least one context is needed, not {limit}")
        self._open_pair = open_pair
        self._limit = limit
        self._clock = clock
        self._contexts: list[Context] = [Context(open_pair(), clock)]  # the last used stands last

    @property
    def newest(self) -> Context:
        """The context used last."""
        return self._contexts[-1]

    @property
    def opened(self) -> list[Context]:
        """All that are open; a copy, so that another thread may look."""
        return list(self._contexts)

    def __len__(self) -> int:
        return len(self._contexts)

    def choose(self, tokens: TokenArray) -> Context:
        """The context to answer `tokens` on; it counts as used."""
        best = max(self._contexts, key=lambda context: context.shared(tokens))
        held = len(best.decoder.prefix)
        if held > 0 and best.shared(tokens) < CONTINUED_SHARE * held:
            unused = [context for context in self._contexts if len(context.decoder.prefix) == 0]
            if unused:
                best = unused[0]
            elif len(self._contexts) < self._limit:
                self._contexts.append(Context(self._open_pair(), self._clock))
                best = self._contexts[-1]
            else:
                best = self._contexts[0]
        self._contexts.remove(best)
        self._contexts.append(best)
        return best

    def close(self) -> None:
        for context in self._contexts:
            context.close()
        self._contexts.clear()

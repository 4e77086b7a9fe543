"""The status line: link, speed, acceptance. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from starsd_edge.chat.answer import Figures

__all__ = [
    "NOT_EXACT",
    "NOT_WORTH_WAITING",
    "SWITCHED_OFF",
    "LinkState",
    "LinkStatus",
    "figures_line",
    "link_words",
    "statistics",
]

# Why a device that has a draft service decodes plainly; the monitor shows the same words.
SWITCHED_OFF = "drafting is switched off here"
NOT_WORTH_WAITING = "a plain step is worth more here than waiting for a tree"
NOT_EXACT = "this runtime verifies no tree to the bit; --draft inexact drafts all the same"


class LinkState(Enum):
    """Whether drafts come, and are used."""

    NONE = "no draft service"  # none was named
    OFF = "drafting off"  # the user said so
    CONNECTED = "connected"  # too few rounds yet to say whether drafts are used
    READY = "drafting"
    UNUSED = "plain steps are faster"  # drafts come, and waiting for them does not pay
    INEXACT = "no exact trees"  # this runtime cannot verify trees to the bit
    BLOCKED = "context not drafted"  # the service answers, but takes this context no more
    LOST = "draft service lost"
    NO_SERVER = "server lost"  # whose draft service it would be

    @property
    def is_linked(self) -> bool:
        """Whether the service answers."""
        return self in (LinkState.CONNECTED, LinkState.READY, LinkState.UNUSED, LinkState.BLOCKED)


@dataclass(frozen=True, slots=True)
class LinkStatus:
    """The draft service as this chat sees it.

    reason  why it is lost, or drafts for this context no more
    wait_s  what a tree takes
    local   this device drafts itself, from what was said before
    """

    state: LinkState
    service: str = ""
    reason: str = ""
    wait_s: float = 0.0
    local: bool = False


def link_words(link: LinkStatus) -> str:
    """`drafting via tcp://host:5555 (12 ms)`."""
    without = "drafting from what was said before" if link.local else "decoding plainly"
    if link.state is LinkState.CONNECTED:
        return connection_words(link)
    if link.state is LinkState.READY:
        return f"drafting via {link.service} ({link.wait_s * 1e3:.0f} ms)"
    if link.state is LinkState.UNUSED:
        return f"decoding plainly: faster here than drafts from {link.service} ({link.wait_s * 1e3:.0f} ms)"
    if link.state in (LinkState.LOST, LinkState.BLOCKED):
        return f"{without}: {link.reason or 'the draft service is lost'}"
    if link.state is LinkState.NO_SERVER:
        return link.reason or "the server does not answer"
    if link.state is LinkState.INEXACT:
        return "decoding plainly: no tree is exact at this precision (--draft inexact drafts)"
    if link.state is LinkState.OFF:
        return "decoding plainly: drafting is off"
    return without


WHY_PLAIN = {LinkState.OFF: SWITCHED_OFF, LinkState.INEXACT: NOT_EXACT}


def connection_words(link: LinkStatus) -> str:
    """`connected to tcp://host:5555 (12 ms)`, whatever is made of it."""
    if link.state is LinkState.NONE:
        return str(link.state.value)
    if link.state in (LinkState.LOST, LinkState.NO_SERVER):
        return f"not connected: {link.reason or 'the draft service is lost'}"
    wait = f" ({link.wait_s * 1e3:.0f} ms)" if link.wait_s else ""
    return f"connected to {link.service}{wait}" if link.service else str(link.state.value)


def why_plain(link: LinkStatus) -> str:
    """Why an answer had no trees, as the monitor says it."""
    if link.state in (LinkState.LOST, LinkState.BLOCKED):
        return link.reason or "the draft service is lost"
    return WHY_PLAIN.get(link.state, NOT_WORTH_WAITING)


def figures_line(figures: Figures) -> str:
    """`128 tokens · 21.4 tokens/s · 2.31 tokens a round`, as far as there is something to say."""
    parts = [f"{figures.completion_tokens} token{'s' * (figures.completion_tokens != 1)}"]
    if figures.tokens_per_s > 0:
        parts.append(f"{figures.tokens_per_s:.1f} tokens/s")
    if figures.tree_rounds:
        parts.append(f"{figures.tokens_a_round:.2f} tokens a round")
    return " · ".join(parts)


def statistics(figures: Figures, link: LinkStatus) -> list[tuple[str, str]]:
    """What /stats shows of one answer: name and value."""
    rows = [
        ("prompt", f"{figures.prompt_tokens} tokens, {figures.cached_tokens} of them cached"),
        ("first token", f"after {figures.first_token_s * 1e3:.0f} ms"),
        ("answer", f"{figures.completion_tokens} tokens in {figures.generation_s:.2f} s"),
        ("speed", f"{figures.tokens_per_s:.1f} tokens/s"),
    ]
    rounds = figures.tree_rounds + figures.plain_rounds
    if rounds:
        rows.append(("rounds", f"{rounds}, {figures.plain_rounds} of them plain"))
        rows.append(("tokens a round", f"{figures.tokens_a_round:.2f}"))
    if figures.tree_rounds:
        rows.append(("acceptance length", f"{figures.acceptance_length:.2f} tokens a tree, bonus included"))
    if figures.drafted:
        share = figures.accepted / figures.drafted
        rows.append(("draft tokens", f"{figures.drafted}, {figures.accepted} accepted ({share:.0%})"))
    if figures.tree_rounds and any(figures.calibration_error):
        errors = ", ".join(f"{error:.2f}" for error in figures.calibration_error)
        rows.append(("calibration", f"draft probabilities off by {errors} at depth 1, 2, ..."))
    if figures.settled:
        share = figures.settled_s / figures.generation_s if figures.generation_s else 0.0
        rate = figures.settled / max(figures.completion_tokens - 1, 1)
        rows.append(
            (
                "margin guard",
                f"{figures.settled} close decisions ({rate:.0%} of the tokens) settled by plain steps, "
                f"{figures.settled_s:.2f} s ({share:.0%} of the time)",
            )
        )
    if figures.joules is not None and figures.joules_per_token is not None:
        rows.append(("energy", f"{figures.joules:.1f} J, {figures.joules_per_token:.2f} J a token"))
    rows.append(("link", connection_words(link)))
    if rounds and not figures.tree_rounds and link.state is not LinkState.NONE:
        rows.append(("plain because", why_plain(link)))
    return rows

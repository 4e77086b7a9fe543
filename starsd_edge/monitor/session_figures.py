"""What is shown of one session: the same numbers as of a device, for one context, and where it stands."""

from __future__ import annotations

from dataclasses import dataclass

from starsd_edge.monitor.figures import Figure
from starsd_edge.monitor.format import Form, clean
from starsd_edge.monitor.views import SessionView

__all__ = ["SESSION_COLUMNS", "SESSION_FIGURES", "SessionColumn"]

NAME_LETTERS = 8  # of sixteen: enough to tell the sessions of a device apart


def by_depth(view: SessionView) -> str | None:
    """`82 61 40`: per cent accepted at depth 1, 2, 3, ..."""
    return " ".join(f"{100 * rate:.0f}" for rate in view.work.depth_rates) or None


SESSION_FIGURES: list[Figure[SessionView]] = [
    Figure(
        "session",
        "SESSION",
        Form.TEXT,
        "the first letters of its number",
        lambda v: clean(v.session.session)[:NAME_LETTERS],
    ),
    Figure(
        "state",
        "STATE",
        Form.TEXT,
        "where it stands in the service: prefilling, queued, drafting, verifying (its tree is with the "
        "edge), idle, evicted",
        lambda v: v.session.state.value,
    ),
    Figure(
        "mode", "MODE", Form.TEXT, "how it decodes: drafting, plain or idle", lambda v: v.session.mode.value
    ),
    Figure(
        "tokens_per_s",
        "TOK/S",
        Form.RATE,
        "committed tokens a second over the window",
        lambda v: v.work.tokens_per_s,
    ),
    Figure(
        "acceptance_length",
        "TAU",
        Form.FACTOR,
        "mean tokens a verified tree brought, bonus included",
        lambda v: v.work.acceptance_length,
    ),
    Figure("tree_nodes", "TREE", Form.RATE, "mean nodes of verified trees", lambda v: v.work.tree_nodes),
    Figure(
        "late_trees",
        "LATE",
        Form.COUNT,
        "late trees still of use, in the window",
        lambda v: v.work.grown("late_trees"),
    ),
    Figure(
        "stale_trees",
        "STALE",
        Form.COUNT,
        "trees dropped, in the window",
        lambda v: v.work.grown("stale_trees"),
    ),
    Figure(
        "fallbacks",
        "FALLB",
        Form.COUNT,
        "times it went over to plain decoding, in the window",
        lambda v: sum(v.work.fallbacks.values()),
    ),
    Figure(
        "committed_len",
        "TOKENS",
        Form.COUNT,
        "committed tokens of the context that the service knows of",
        lambda v: v.session.committed_len,
    ),
    Figure(
        "kv_rows", "KV", Form.COUNT, "rows of the draft KV cache that it holds", lambda v: v.session.kv_rows
    ),
    Figure("age_s", "AGE", Form.AGE, "since it was opened", lambda v: v.session.age_s),
    Figure("quiet_s", "QUIET", Form.AGE, "since its last message", lambda v: v.session.quiet_s),
    Figure("head", "HEAD", Form.TEXT, "the draft head that serves it", lambda v: v.session.head or None),
    Figure("by_depth", "BY DEPTH", Form.TEXT, "per cent of walks accepted at depth 1, 2, 3, ...", by_depth),
]


@dataclass(frozen=True, slots=True)
class SessionColumn:
    """A column of the session table; it appears on screens at least `from_width` cells wide."""

    key: str
    width: int
    from_width: int = 80
    is_text: bool = False


SESSION_COLUMNS = (
    SessionColumn("session", 8, is_text=True),
    SessionColumn("state", 10, is_text=True),
    SessionColumn("mode", 8, is_text=True),
    SessionColumn("tokens_per_s", 6),
    SessionColumn("acceptance_length", 5),
    SessionColumn("tree_nodes", 5),
    SessionColumn("late_trees", 4),
    SessionColumn("stale_trees", 5),
    SessionColumn("fallbacks", 5, 100),
    SessionColumn("committed_len", 6),
    SessionColumn("kv_rows", 6, 100),
    SessionColumn("age_s", 5),
    SessionColumn("quiet_s", 5, 100),
    SessionColumn("head", 18, 120, is_text=True),
    SessionColumn("by_depth", 24, 150, is_text=True),
)

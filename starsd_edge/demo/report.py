"""What the demo measured, as figures, a table and JSON. Pure.

Tokens are counted alike on both sides: every committed token after the first one, nothing past the stop
token; seconds run from the first token to the last.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

__all__ = ["Answer", "Comparison", "Summary", "as_json", "as_table", "remarks", "summarise"]

TOLERATED_OVERRUNS = 0.02  # share of forwards: more shows in the second digit of a ratio

COLUMNS = (
    "plain\ntok/s",
    "StarSD\ntok/s",
    "ratio",
    "accept.\nlength",
    "up\nB/round",
    "down\nB/round",
    "same\ntext",
)


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of one target, and what it took.

    tokens          committed tokens, stop token included
    decode_s        from the first token to the last
    rounds          rounds of that time, plain ones included
    updates         rounds that went to the draft service, update_bytes what they took on the link; the
                    prompt's rows are not in there
    downlink_bytes  all that came back
    overruns        forwards that took longer here than the emulated device would
    outage          why the draft service was away, if it was
    """

    tokens: list[int]
    decode_s: float
    rounds: int
    accepted: int
    verified_rounds: int
    updates: int = 0
    update_bytes: int = 0
    downlink_bytes: int = 0
    overruns: int = 0
    outage: str = ""

    @property
    def tokens_per_s(self) -> float:
        return (len(self.tokens) - 1) / self.decode_s if self.decode_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same prompt decoded plainly and with StarSD, one after the other in one process."""

    prompt: str
    plain: Answer
    starsd: Answer

    @property
    def identical(self) -> bool:
        return self.plain.tokens == self.starsd.tokens

    @property
    def ratio(self) -> float:
        plain = self.plain.tokens_per_s
        return self.starsd.tokens_per_s / plain if plain > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Summary:
    """Medians over the prompts; ratio is the median of the prompts' own ratios.

    verified_share  of StarSD's rounds, those that verified a tree; the others were plain steps
    overrun_share   of all forwards, those that this machine was too slow for: above a few per cent the
                    figures are not the profile's
    outage          why the draft service was away, where it was
    """

    profile: str
    prompts: int
    identical: int
    plain_tokens_per_s: float
    starsd_tokens_per_s: float
    ratio: float
    acceptance_length: float
    uplink_bytes_per_round: float
    downlink_bytes_per_round: float
    verified_share: float = 0.0
    overrun_share: float = 0.0
    outage: str = ""


def summarise(profile: str, comparisons: Sequence[Comparison]) -> Summary:
    """Answers of a single token say nothing of speed and count for equality only."""
    timed = [c for c in comparisons if len(c.plain.tokens) > 1] or list(comparisons)
    starsd = [c.starsd for c in comparisons]
    answers = [*starsd, *(c.plain for c in comparisons)]
    updates = sum(answer.updates for answer in starsd)
    verified = sum(answer.verified_rounds for answer in starsd)
    return Summary(
        profile=profile,
        prompts=len(comparisons),
        identical=sum(c.identical for c in comparisons),
        plain_tokens_per_s=statistics.median(c.plain.tokens_per_s for c in timed),
        starsd_tokens_per_s=statistics.median(c.starsd.tokens_per_s for c in timed),
        ratio=statistics.median(c.ratio for c in timed),
        acceptance_length=1 + sum(answer.accepted for answer in starsd) / verified if verified else 1.0,
        uplink_bytes_per_round=sum(a.update_bytes for a in starsd) / max(updates, 1),
        downlink_bytes_per_round=sum(a.downlink_bytes for a in starsd) / max(updates, 1),
        verified_share=verified / max(sum(answer.rounds for answer in starsd), 1),
        overrun_share=sum(a.overruns for a in answers) / max(sum(a.rounds for a in answers), 1),
        outage=next((answer.outage for answer in starsd if answer.outage), ""),
    )


def as_json(summary: Summary) -> dict[str, object]:
    """The keys that scripts read."""
    return {
        "plain_tokens_per_s": round(summary.plain_tokens_per_s, 3),
        "starsd_tokens_per_s": round(summary.starsd_tokens_per_s, 3),
        "ratio": round(summary.ratio, 4),
        "acceptance_length": round(summary.acceptance_length, 4),
        "prompts": summary.prompts,
        "identical": summary.identical,
        "uplink_bytes_per_round": round(summary.uplink_bytes_per_round, 1),
        "downlink_bytes_per_round": round(summary.downlink_bytes_per_round, 1),
        "verified_share": round(summary.verified_share, 4),
        "overrun_share": round(summary.overrun_share, 4),
        "profile": summary.profile,
    }


def as_table(summaries: Sequence[Summary]) -> Table:
    """One row a profile."""
    table = Table(title="plain against StarSD (medians over the prompts)", title_justify="left")
    table.add_column("timing of")
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for s in summaries:
        table.add_row(
            s.profile,
            f"{s.plain_tokens_per_s:.1f}",
            f"{s.starsd_tokens_per_s:.1f}",
            f"{s.ratio:.2f}x",
            f"{s.acceptance_length:.2f}",
            f"{s.uplink_bytes_per_round:.0f}",
            f"{s.downlink_bytes_per_round:.0f}",
            f"{s.identical}/{s.prompts}",
        )
    return table


def remarks(summary: Summary) -> list[str]:
    """What a reader must know before the figures are believed, a line each."""
    lines = [f"{summary.verified_share:.0%} of StarSD's rounds verified a tree, the others were plain steps"]
    if summary.outage:
        lines.append(f"the draft service was away for a time: {summary.outage}")
    if summary.overrun_share > TOLERATED_OVERRUNS:
        lines.append(
            f"too slow here for {summary.overrun_share:.0%} of the forwards: "
            "those figures are not the profile's"
        )
    return [f"{summary.profile}: {line}" for line in lines]

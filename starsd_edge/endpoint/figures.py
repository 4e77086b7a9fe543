"""An answer's figures as other programs read them: vLLM's `metrics`, llama.cpp's `timings`. Pure."""

from __future__ import annotations

import msgspec

from starsd_edge.chat.answer import Figures
from starsd_edge.endpoint.openai import PromptTokensDetails, Usage

__all__ = ["Metrics", "Speculation", "Timings", "metrics_of", "timings_of", "usage_of"]


class Speculation(msgspec.Struct):
    """vLLM's per-request acceptance metrics: rounds that verified a tree; counts exclude bonus tokens."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    acceptance_histogram_by_draft_length: dict[str, list[int]]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int


class Metrics(msgspec.Struct):
    """vLLM's per-request metrics, the energy of the whole device where its board reports power, and plain
    steps that the margin guard took."""

    time_to_first_token_ms: float
    generation_time_ms: float
    queue_time_ms: float
    mean_itl_ms: float
    tokens_per_second: float
    speculative_decoding: Speculation
    energy_joules: float | None = None
    guard_steps: int = 0
    guard_time_ms: float = 0.0


class Timings(msgspec.Struct):
    """llama.cpp's."""

    prompt_n: int
    cache_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float
    draft_n: int
    draft_n_accepted: int


def usage_of(figures: Figures) -> Usage:
    return Usage(
        figures.prompt_tokens,
        figures.completion_tokens,
        figures.prompt_tokens + figures.completion_tokens,
        PromptTokensDetails(figures.cached_tokens),
    )


def metrics_of(figures: Figures) -> Metrics:
    rest = max(figures.completion_tokens - 1, 0)
    return Metrics(
        time_to_first_token_ms=figures.first_token_s * 1e3,
        generation_time_ms=figures.generation_s * 1e3,
        queue_time_ms=figures.queue_s * 1e3,
        mean_itl_ms=figures.generation_s * 1e3 / rest if rest else 0.0,
        tokens_per_second=figures.tokens_per_s,
        speculative_decoding=_speculation(figures),
        energy_joules=figures.joules,
        guard_steps=figures.settled,
        guard_time_ms=figures.settled_s * 1e3,
    )


def timings_of(figures: Figures) -> Timings:
    return Timings(
        prompt_n=figures.prompt_tokens - figures.cached_tokens,
        cache_n=figures.cached_tokens,
        prompt_ms=figures.first_token_s * 1e3,
        predicted_n=figures.completion_tokens,
        predicted_ms=figures.generation_s * 1e3,
        predicted_per_second=figures.tokens_per_s,
        draft_n=figures.drafted,
        draft_n_accepted=figures.accepted,
    )


def _speculation(figures: Figures) -> Speculation:
    longest = max((drafted for drafted, _ in figures.verified), default=0)
    histogram = [0] * (longest + 1)
    by_length: dict[str, list[int]] = {}
    for (drafted, accepted), rounds in sorted(figures.verified.items()):
        histogram[accepted] += rounds
        by_length.setdefault(str(drafted), [0] * (drafted + 1))[accepted] += rounds
    rounds = figures.tree_rounds
    return Speculation(
        mean_acceptance_length=1.0 + figures.accepted / rounds if rounds else 1.0,
        draft_acceptance_rate=figures.accepted / figures.drafted if figures.drafted else 0.0,
        acceptance_histogram=histogram,
        acceptance_histogram_by_draft_length=by_length,
        num_spec_steps=rounds,
        num_accepted_draft_tokens=figures.accepted,
        num_draft_tokens=figures.drafted,
        num_spec_tokens=longest,
    )

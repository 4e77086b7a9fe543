"""What `/metrics` tells Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from starsd_edge.chat.answer import Figures

__all__ = ["EndpointMetrics"]

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class EndpointMetrics:
    """Counters of one server. Speculative ones have the meaning of vLLM's: rounds that verified a tree, their
    draft tokens, and those accepted without bonus tokens."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "starsd_requests", "Requests, by what became of them", ["outcome"], registry=self._registry
        )
        self._prompt = Counter("starsd_prompt_tokens", "Tokens of prompts", registry=self._registry)
        self._cached = Counter(
            "starsd_cached_tokens", "Prompt tokens found in a KV cache", registry=self._registry
        )
        self._generated = Counter("starsd_generation_tokens", "Tokens generated", registry=self._registry)
        self._drafts = Counter("starsd_spec_num_drafts", "Rounds with a tree", registry=self._registry)
        self._drafted = Counter(
            "starsd_spec_num_draft_tokens", "Draft tokens verified", registry=self._registry
        )
        self._accepted = Counter(
            "starsd_spec_num_accepted_tokens", "Draft tokens accepted", registry=self._registry
        )
        self._per_position = Counter(
            "starsd_spec_num_accepted_tokens_per_pos",
            "Rounds of which depth position + 1 was accepted",
            ["position"],
            registry=self._registry,
        )
        self._guard = Counter(
            "starsd_guard_steps", "Plain steps that settled a close decision", registry=self._registry
        )
        self._first_token = Histogram(
            "starsd_time_to_first_token_seconds",
            "From the start of a prompt to its first token",
            buckets=SECONDS,
            registry=self._registry,
        )
        self._queue_time = Histogram(
            "starsd_queue_time_seconds", "Waited for a turn", buckets=SECONDS, registry=self._registry
        )
        self._waiting = Gauge("starsd_requests_waiting", "Requests that wait now", registry=self._registry)
        self._running = Gauge("starsd_requests_running", "Requests answered now", registry=self._registry)
        self._link = Gauge("starsd_link_ready", "1 while drafts come", registry=self._registry)

    def answered(self, figures: Figures, outcome: str) -> None:
        """Count a finished answer; `outcome` is its finish reason."""
        self._requests.labels(outcome).inc()
        self._prompt.inc(figures.prompt_tokens)
        self._cached.inc(figures.cached_tokens)
        self._generated.inc(figures.completion_tokens)
        self._drafts.inc(figures.tree_rounds)
        self._drafted.inc(figures.drafted)
        self._accepted.inc(figures.accepted)
        self._guard.inc(figures.settled)
        for (_, accepted), rounds in figures.verified.items():
            for position in range(accepted):
                self._per_position.labels(str(position)).inc(rounds)
        self._queue_time.observe(figures.queue_s)
        if figures.completion_tokens:
            self._first_token.observe(figures.first_token_s)

    def refused(self, outcome: str) -> None:
        """Count a request that got no answer."""
        self._requests.labels(outcome).inc()

    def exposition(self, *, waiting: int, running: bool, link_ready: bool) -> bytes:
        """The text format."""
        self._waiting.set(waiting)
        self._running.set(running)
        self._link.set(link_ready)
        return generate_latest(self._registry)

"""What a message may weigh and how long anyone waits. Every number here is part of docs/protocol.md.

The limits bound what one peer can make the other hold; they are checked before anything is allocated.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "ACK_WINDOW",
    "DEFAULT_TIMING",
    "MAX_CHUNK_BYTES",
    "MAX_CONTEXT_TOKENS",
    "MAX_FEATURE_SIZE",
    "MAX_FRAMES",
    "MAX_GREETING_BYTES",
    "MAX_HISTORY_BYTES",
    "MAX_NODES",
    "MAX_PENDING",
    "MAX_PING_PADDING_BYTES",
    "MAX_ROWS",
    "MAX_TEXT_BYTES",
    "MAX_VOCAB_SIZE",
    "EdgeTiming",
]

MAX_FRAMES = 3  # head, ids, features: no message has more
MAX_CHUNK_BYTES = 256 * 1024  # of features in one message: 0.26 s on a 1 MB/s uplink, well inside a heartbeat
MAX_ROWS = 4096  # rows in one message, where rows are so narrow that the bytes do not bound them
MAX_NODES = 256  # a draft tree: parents are one byte each
MAX_FEATURE_SIZE = 0xFFFF  # elements of a row: 3 x 8,192 (EAGLE-3 on a 70B model) fits with room
MAX_VOCAB_SIZE = 1 << 24  # ids of four bytes are used above 65,536; no tokenizer comes near this
MAX_CONTEXT_TOKENS = 1 << 20  # base_len beyond this is a broken peer, not a long context
MAX_GREETING_BYTES = 8 * 1024  # HELLO and WELCOME bodies are about 700 bytes
MAX_TEXT_BYTES = 512  # an error text is one line
MAX_PING_PADDING_BYTES = 64 * 1024  # bandwidth is measured by padded pings
MAX_HISTORY_BYTES = 256 * 1024 * 1024  # what an edge keeps of its context: 32k tokens of a 7B model in fp16

MAX_PENDING = 4  # unanswered requests of one session: OPEN, ACK_WINDOW chunks, and the update behind them
ACK_WINDOW = 2  # prefill chunks under way: one on the line while the other is computed


@dataclass(frozen=True, slots=True)
class EdgeTiming:
    """How patient an edge is. Seconds.

    None of these delays a token: the decode loop takes a plain step when waiting is not worth it. They decide
    when a request is sent again and when the service is taken to be gone.

    answer_s       a HELLO, UPDATE or PING unanswered this long counts as a miss
    chunk_s        the same for a prefill chunk: MAX_CHUNK_BYTES at 50 kB/s, behind another one
    max_misses     misses in a row that open the breaker
    ping_s         silence after which a PING asks whether the scheduling loop still turns
    probe_first_s  first pause of an open breaker; doubled up to probe_max_s, each with +-25 % jitter
    """

    answer_s: float = 2.0
    chunk_s: float = 12.0
    max_misses: int = 3
    ping_s: float = 5.0
    probe_first_s: float = 0.25
    probe_max_s: float = 10.0

    def __post_init__(self) -> None:
        if min(self.answer_s, self.chunk_s, self.ping_s, self.probe_first_s) <= 0 or self.max_misses < 1:
            raise ValueError("every patience of an edge is above zero")


DEFAULT_TIMING = EdgeTiming()

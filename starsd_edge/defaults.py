"""What the two services do unless told otherwise: said once, for them and for whoever starts or asks them."""

from __future__ import annotations

__all__ = ["DRAFT_PORT", "DRAIN_S", "ENDPOINT_PORT", "MAX_DRAIN_S"]

DRAFT_PORT = 7731  # of `starsd draft serve`
ENDPOINT_PORT = 8642  # of `starsd serve`
DRAIN_S = 60.0  # of `starsd serve`, for answers under way when it is told to stop
MAX_DRAIN_S = 86_400  # a day

"""A target whose forwards take time."""

from __future__ import annotations

from starsd_edge.decoding.roles import TargetOutput
from starsd_edge.decoding.tree import DraftTree
from starsd_edge.testing import FakeClock, ToyTarget

FORWARD_S = 0.05


class SlowTarget(ToyTarget):
    """A forward takes longer than its drafter needs, so that trees arrive in the middle of one."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self.clock = clock

    def forward(self, tree: DraftTree) -> TargetOutput:
        self.clock.advance(FORWARD_S)
        return super().forward(tree)

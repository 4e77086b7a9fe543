"""Two real draft services: whatever happens to the one in use, the text goes on, with drafts of the other."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from starsd_edge.link.placement import Place, in_order
from tests.e2e.drafting import PROMPT, Edge, Running, serving

pytestmark = pytest.mark.slow

DEVICE = "jet1"
TOKENS = 120


@contextmanager
def two_services(head: Path) -> Iterator[list[Running]]:
    """In the order in which the device takes them."""
    with ExitStack() as stack:
        services = {each.address: each for each in [stack.enter_context(serving(head)) for _ in range(2)]}
        yield [services[address] for address in in_order(DEVICE, list(services))]


def kill(service: Running) -> None:
    """At once and without a word: both processes, so that nothing answers until they were started again."""
    for name in ("gateway", "worker"):
        service.signal(name, signal.SIGSTOP)


def leave(service: Running) -> None:
    assert service.leave() == 0


@pytest.mark.parametrize("end", [leave, kill])
def test_the_text_goes_on_and_the_other_service_drafts(
    head_folder: Path, end: Callable[[Running], None]
) -> None:
    with two_services(head_folder) as (first, second):
        edge = Edge(first.address, device=DEVICE, others=[Place(second.address)]).joined()
        try:
            assert first.address == edge.drafter.address
            edge.generate(PROMPT, TOKENS, {40: lambda: end(first)})
            edge.drafts_again()
            assert second.address == edge.drafter.address
        finally:
            edge.close()
            if end is kill:
                for name in ("gateway", "worker"):
                    first.signal(name, signal.SIGCONT)

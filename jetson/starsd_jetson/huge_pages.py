"""Weights in huge pages, so that a model runs at one speed.

A forward reads all weights once, far more memory than a TLB of 4 KiB pages covers, and where those pages lie
differs from load to load: three loads of one float32 bundle in one process ran at 37, 32 and 29 ms a step,
each steadily, and all at 26 ms once their memory was in huge pages (SmolLM2-135M, a virtual machine). ONNX
Runtime does not ask for them.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Region", "collapse", "huge_pages_of_new_memory", "read_regions"]

HUGE_BYTES = 2 << 20  # of a huge page on x86-64, and on aarch64 with 4 KiB pages
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25  # the second from Linux 6.1
# Collapsing fills a mapping: one that is mostly untouched would take the memory that it had only reserved.
FILLED_SHARE = 0.9
SMAPS = Path("/proc/self/smaps")


@dataclass(frozen=True, slots=True)
class Region:
    """A private writable mapping without a file; addresses in bytes."""

    start: int
    end: int
    resident: int


@contextlib.contextmanager
def huge_pages_of_new_memory() -> Iterator[None]:
    """Put what is allocated meanwhile into huge pages at the end. Does nothing where the kernel cannot."""
    before = {region.start: region.end for region in own_regions()}
    yield
    for region in own_regions():
        if before.get(region.start) != region.end:
            collapse(region)


def own_regions() -> list[Region]:
    try:
        return read_regions(SMAPS.read_text("ascii", "replace"))
    except OSError:
        return []


def read_regions(smaps: str) -> list[Region]:
    """The anonymous private writable mappings in the text of /proc/self/smaps."""
    regions = []
    start = end = 0
    for line in smaps.splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            anonymous = words[1].startswith("rw") and words[1].endswith("p") and words[4] == "0"
            start, end = (int(word, 16) for word in words[0].split("-")) if anonymous else (0, 0)
        elif words[0] == "Rss:" and end:
            regions.append(Region(start, end, int(words[1]) * 1024))
    return regions


def collapse(region: Region) -> bool:
    """Whether the whole huge pages of the region are huge now; refused for one that is not filled."""
    start = -(-region.start // HUGE_BYTES) * HUGE_BYTES
    size = region.end // HUGE_BYTES * HUGE_BYTES - start
    if size <= 0 or region.resident < FILLED_SHARE * (region.end - region.start):
        return False
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return all(madvise(start, size, advice) == 0 for advice in (MADV_HUGEPAGE, MADV_COLLAPSE))

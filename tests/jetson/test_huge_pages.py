"""Weights go into huge pages where the kernel can, and nothing happens where it cannot."""

from __future__ import annotations

import mmap

import pytest

from starsd_jetson import huge_pages
from starsd_jetson.huge_pages import HUGE_BYTES, Region, collapse, read_regions

SMAPS = """\
55d0c8a00000-55d0c8a21000 rw-p 00000000 00:00 0                          [heap]
Size:                132 kB
Rss:                  64 kB
Private_Dirty:        64 kB
7f2a00000000-7f2a10000000 rw-p 00000000 00:00 0
Size:             262144 kB
Rss:              262144 kB
7f2a20000000-7f2a20021000 r-xp 00000000 fd:00 1234                       /usr/lib/libc.so.6
Rss:                 132 kB
7f2a30000000-7f2a30021000 rw-p 00021000 fd:00 1234                       /usr/lib/libc.so.6
Rss:                 132 kB
7f2a40000000-7f2a40021000 rw-s 00000000 00:01 99                         /dev/shm/x
Rss:                 132 kB
VmFlags: rd wr
"""


def test_only_private_memory_without_a_file_counts() -> None:
    assert read_regions(SMAPS) == [
        Region(0x55D0C8A00000, 0x55D0C8A21000, 64 << 10),
        Region(0x7F2A00000000, 0x7F2A10000000, 256 << 20),
    ]


def test_memory_that_is_only_reserved_is_left_alone() -> None:
    """Collapsing it would make it real."""
    assert not collapse(Region(0x7F2A00000000, 0x7F2A10000000, 100 << 20))


def test_a_region_without_one_whole_huge_page_is_left_alone() -> None:
    assert not collapse(Region(4096, HUGE_BYTES - 4096, HUGE_BYTES))


def test_contents_stay_what_they_are() -> None:
    with huge_pages.huge_pages_of_new_memory():
        memory = mmap.mmap(-1, 4 * HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.write(b"\x5a" * len(memory))
    assert memory[:] == b"\x5a" * len(memory)
    memory.close()


def test_without_a_list_of_mappings_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "SMAPS", huge_pages.SMAPS / "missing")
    with huge_pages.huge_pages_of_new_memory():
        pass

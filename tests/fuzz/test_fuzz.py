"""Every decoder against mutated golden vectors: a short run without coverage guidance, on every machine.

Longer, and guided by coverage, with atheris (which is not a dependency; it needs clang's runtime):

    pip install atheris
    python -m tests.fuzz.guided decode -max_total_time=600
"""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterator

import pytest

from tests.fuzz.targets import CORPUS, TARGETS, join_frames, split_frames

ROUNDS = {"decode": 8_000, "service": 250, "edge": 250, "table": 1_000, "snapshot": 3_000}
INTERESTING = [0, 1, 0x7F, 0x80, 0xFF]
MAX_ALLOCATED_BYTES = 4 << 20  # a message is 64 KiB here at most


def mutations(count: int, seed: int) -> Iterator[bytes]:
    """Golden vectors, cut, flipped, overwritten, repeated and spliced."""
    chance = random.Random(seed)
    for _ in range(count):
        data = bytearray(chance.choice(CORPUS))
        for _ in range(chance.randrange(1, 5)):
            place = chance.randrange(len(data) + 1)
            match chance.randrange(6):
                case 0 if place < len(data):
                    data[place] ^= 1 << chance.randrange(8)
                case 1 if place < len(data):
                    data[place] = chance.choice(INTERESTING)
                case 2:
                    del data[place : place + chance.randrange(1, 9)]
                case 3:
                    data[place:place] = chance.randbytes(chance.randrange(1, 9))
                case 4:
                    frames = split_frames(bytes(data))
                    chance.shuffle(frames)
                    data = bytearray(join_frames(frames[: chance.randrange(5)]))
                case 5:
                    data += chance.choice(CORPUS)
        yield bytes(data)


@pytest.mark.parametrize("name", TARGETS)
def test_no_bytes_break_a_decoder(name: str) -> None:
    for data in mutations(ROUNDS[name], seed=1):
        run_one(name, data)


def test_no_bytes_make_a_decoder_allocate_more_than_they_are_worth() -> None:
    tracemalloc.start()
    try:
        for data in mutations(500, seed=2):
            run_one("decode", data)
        assert tracemalloc.get_traced_memory()[1] < MAX_ALLOCATED_BYTES
    finally:
        tracemalloc.stop()


def run_one(name: str, data: bytes) -> None:
    # Several messages in one string, for the targets that take a conversation.
    conversation = bytes([2]) + data if name in ("service", "edge", "table") else data
    try:
        TARGETS[name](conversation)
    except Exception as error:
        raise AssertionError(f"{name} fails with {conversation.hex()}") from error


@pytest.mark.parametrize("name", TARGETS)
def test_the_golden_vectors_themselves_pass(name: str) -> None:
    for data in CORPUS:
        TARGETS[name](data)

"""Every decoder against mutated samples: a short run without coverage guidance, on every machine.

Longer, and guided by coverage, with atheris (which is not a dependency; it needs clang's runtime):

    pip install atheris
    python -m tests.fuzz.guided decode -max_total_time=600
"""

from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fuzz.targets import CORPORA, TARGETS, join_frames, split_frames

ROUNDS = {"decode": 8_000, "service": 250, "edge": 250, "table": 1_000, "snapshot": 3_000, "report": 1_000}
INTERESTING = [0, 1, 0x7F, 0x80, 0xFF]
MAX_ALLOCATED_BYTES = 4 << 20  # a message is 64 KiB here at most


def mutations(name: str, count: int, seed: int) -> Iterator[bytes]:
    """The target's samples, cut, flipped, overwritten, repeated and spliced."""
    chance = random.Random(seed)
    corpus = CORPORA[name]
    for _ in range(count):
        data = bytearray(chance.choice(corpus))
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
                    data += chance.choice(corpus)
        yield bytes(data)


# What no field expects: other types, beyond 64 bits, next to a double's end, too long, too deep.
STRANGE: list[Any] = [
    None, True, -1, 2**53, 2**64, 1e308, -0.5, "", "x" * 81, "\ud800", [], {}, [[]] * 65, {"a": {"a": {}}}
]  # fmt: skip


def misfits(name: str, count: int, seed: int) -> Iterator[bytes]:
    """JSON that is not what it should be: one value in each is replaced, taken out or multiplied."""
    chance = random.Random(seed)
    for _ in range(count):
        document = json.loads(chance.choice(CORPORA[name]))
        parent, key = chance.choice(list(places(document)))
        match chance.randrange(3):
            case 0:
                parent[key] = chance.choice(STRANGE)
            case 1:
                del parent[key]
            case 2:
                parent[key] = [parent[key]] * chance.choice([2, 33, 2000])
        yield json.dumps(document).encode()


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Where every value of a document stands: what holds it, and its key there."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield value, key
        if isinstance(inner, dict | list):
            yield from places(inner)


@pytest.mark.parametrize("name", TARGETS)
def test_no_bytes_break_a_decoder(name: str) -> None:
    for data in mutations(name, ROUNDS[name], seed=1):
        run_one(name, data)


@pytest.mark.parametrize("name", ["snapshot", "report"])
def test_no_document_breaks_the_monitor(name: str) -> None:
    for data in misfits(name, ROUNDS[name], seed=3):
        run_one(name, data)


def test_no_bytes_make_a_decoder_allocate_more_than_they_are_worth() -> None:
    tracemalloc.start()
    try:
        for data in mutations("decode", 500, seed=2):
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
def test_the_samples_themselves_pass(name: str) -> None:
    for data in CORPORA[name]:
        TARGETS[name](data)

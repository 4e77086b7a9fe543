"""Golden vectors: the bytes of every message, and of versions to come, stay what they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from starsd_edge.protocol.codec import decode, encode, kind_of
from starsd_edge.protocol.decoder import DECODERS
from starsd_edge.protocol.features import decode_rows
from starsd_edge.protocol.messages import ErrorCode, MessageKind, Prefill, WireError
from tests.core.protocol.test_codec import same
from tests.core.protocol.wire_samples import SAMPLES

WIRE = Path(__file__).parent / "wire"


def read_vectors(name: str) -> dict[str, list[bytes]]:
    """A vector file: a name, then one indented line of hex a frame."""
    vectors: dict[str, list[bytes]] = {}
    for line in (WIRE / name).read_text().splitlines():
        if line.startswith("  "):
            vectors[list(vectors)[-1]].append(bytes.fromhex(line))
        elif line and not line.startswith("#"):
            vectors[line] = []
    return vectors


V1_0 = read_vectors("v1.0.hex")
V1_9 = read_vectors("v1.9.hex")
V2_0 = read_vectors("v2.0.hex")


def test_every_kind_of_message_has_a_vector() -> None:
    assert {kind_of(sample) for sample in SAMPLES.values()} == set(MessageKind) == set(DECODERS)
    assert set(V1_0) == set(SAMPLES)


@pytest.mark.parametrize("name", V1_0)
def test_a_message_has_these_bytes_and_no_others(name: str) -> None:
    assert encode(SAMPLES[name]) == V1_0[name]


@pytest.mark.parametrize("name", V1_0)
def test_these_bytes_are_this_message(name: str) -> None:
    assert same(SAMPLES[name], decode(V1_0[name]))


@pytest.mark.parametrize("name", V1_9)
def test_a_later_minor_version_is_understood(name: str) -> None:
    """Fields appended to heads, keys added to greetings, reserved bytes in use."""
    assert same(SAMPLES[name], decode(V1_9[name]))


@pytest.mark.parametrize("name", V2_0)
def test_another_major_version_is_refused_by_name(name: str) -> None:
    with pytest.raises(WireError, match="protocol version 2 there, 1 here") as refused:
        decode(V2_0[name])
    assert refused.value.code is ErrorCode.VERSION


def test_features_read_as_the_specification_says() -> None:
    values = {}
    for dtype in ("fp16", "bf16", "int8"):
        message = decode(V1_0[f"prefill-{dtype}"])
        assert isinstance(message, Prefill)
        values[dtype] = decode_rows(message.features).tolist()
    assert values["fp16"] == [[1.0, -2.0], [0.5, 65504.0], [0.0, -0.0]]
    assert values["bf16"] == [[1.0, -2.0], [0.5, 65536.0], [0.0, -0.0]]
    assert values["int8"] == [[127.0, -127.0], [0.5, -0.5], [0.0, 0.0]]

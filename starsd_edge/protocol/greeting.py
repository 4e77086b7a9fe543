"""HELLO and WELCOME: who the two ends are, and whether they fit together.

The only bodies that are not fixed binary: JSON objects, decoded into the closed structs below. Unknown
keys are skipped, so a later minor version may add some; a missing one takes its default or is refused.
"""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgspec
import numpy as np

from starsd_edge.errors import RemoteProtocolError
from starsd_edge.protocol.limits import (
    MAX_CHUNK_BYTES,
    MAX_CONTEXT_TOKENS,
    MAX_FEATURE_SIZE,
    MAX_GREETING_BYTES,
    MAX_NODES,
    MAX_VOCAB_SIZE,
)
from starsd_edge.types import Float32Array

__all__ = ["HelloBody", "Identity", "WelcomeBody", "decode_greeting", "encode_greeting", "projection_hash"]

Name = Annotated[str, msgspec.Meta(max_length=128)]
Hash = Annotated[str, msgspec.Meta(max_length=128)]
CurveSize = Annotated[int, msgspec.Meta(ge=1, le=MAX_CONTEXT_TOKENS)]
CurveSizes = Annotated[list[CurveSize], msgspec.Meta(max_length=64)]
CurvePoints = Annotated[list[float], msgspec.Meta(max_length=64)]


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What a draft head must agree on with its target. Equal identities, and only those, work together.

    target          name, for people
    target_hash     sha256 over the weights the features come from, before quantisation
    tokenizer_hash  sha256 of the model's own file that holds the tokenizer
    feature_layers  layers tapped, in order; (-1,) is the last layer's output
    feature_norm    the taps lie behind the final norm
    projection      sha256 of the matrix that makes a row of the layers tapped, on the edge; unset for none
    feature_size    F, elements of a row on the wire
    """

    target: Name
    target_hash: Hash
    vocab_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_VOCAB_SIZE)]
    tokenizer_hash: Hash
    hidden_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_FEATURE_SIZE)]
    feature_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_FEATURE_SIZE)]
    feature_layers: Annotated[tuple[int, ...], msgspec.Meta(max_length=64)] = (-1,)
    feature_norm: bool = True
    projection: Hash | msgspec.UnsetType = msgspec.UNSET

    def digest(self) -> str:
        """sha256 of the canonical JSON of all fields but the human name, in hex: the compatibility hash."""
        values = msgspec.to_builtins(self)
        del values["target"]
        return hashlib.sha256(msgspec.json.encode(values, order="sorted")).hexdigest()

    def difference(self, other: Identity) -> str | None:
        """None when the two fit; else the first differing field with both values, for people."""
        for field in self.__struct_fields__:
            mine, theirs = getattr(self, field), getattr(other, field)
            if field != "target" and mine != theirs:
                return f"{field} is {shorten(mine)} here and {shorten(theirs)} there"
        return None


def projection_hash(projection: Float32Array) -> str:
    """`Identity.projection` of this matrix [F, layers * H]: sha256 of its rows in little-endian float32."""
    return hashlib.sha256(np.ascontiguousarray(projection, "<f4").tobytes()).hexdigest()


def shorten(value: object) -> str:
    text = "none" if value is msgspec.UNSET else str(value)
    return text if len(text) <= 24 else text[:12] + "..."


class HelloBody(msgspec.Struct, frozen=True, kw_only=True):
    """An edge introduces itself. Sent first on every connection, and again after a restart of the service.

    digest    `identity.digest()`; compared before anything else is looked at
    dtypes    feature dtypes it can send, most wanted first
    head      name of the draft head it wants; "" takes any that fits the identity
    cost_*    its measured cost curve: forward seconds for so many nodes
    """

    identity: Identity
    digest: Hash
    device: Name
    software: Name
    dtypes: Annotated[list[str], msgspec.Meta(min_length=1, max_length=8)]
    max_len: Annotated[int, msgspec.Meta(ge=1, le=MAX_CONTEXT_TOKENS)]
    max_nodes: Annotated[int, msgspec.Meta(ge=1, le=MAX_NODES)]
    head: Name = ""
    profile: Name = ""
    cost_sizes: CurveSizes = []
    cost_seconds: CurvePoints = []


class WelcomeBody(msgspec.Struct, frozen=True, kw_only=True):
    """The service accepts. The head of a WELCOME says what it still holds of the session: epoch, base_len
    (0: nothing) and prefix_crc."""

    service: Name
    software: Name
    head: Name
    digest: Hash
    dtype: Name
    max_len: Annotated[int, msgspec.Meta(ge=1, le=MAX_CONTEXT_TOKENS)]
    max_nodes: Annotated[int, msgspec.Meta(ge=1, le=MAX_NODES)]
    chunk_bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHUNK_BYTES)] = MAX_CHUNK_BYTES
    idle_lease_s: float = 60.0


def encode_greeting(body: HelloBody | WelcomeBody) -> bytes:
    """Canonical JSON: keys sorted, so that golden vectors are stable."""
    return msgspec.json.encode(body, order="sorted")


HELLO_DECODER = msgspec.json.Decoder(HelloBody)
WELCOME_DECODER = msgspec.json.Decoder(WelcomeBody)


def decode_greeting(frame: bytes | memoryview, *, hello: bool) -> HelloBody | WelcomeBody:
    """Raises RemoteProtocolError when the bytes are too many, no JSON, or lack a field."""
    if len(frame) > MAX_GREETING_BYTES:
        raise RemoteProtocolError(f"a greeting of {len(frame)} bytes; {MAX_GREETING_BYTES} are allowed")
    try:
        return HELLO_DECODER.decode(frame) if hello else WELCOME_DECODER.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"greeting refused: {error}") from error

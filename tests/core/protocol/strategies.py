"""Hypothesis strategies for every message of the link."""

from __future__ import annotations

import msgspec
import numpy as np
from hypothesis import strategies as st

from starsd_edge.latency import Histogram
from starsd_edge.protocol.features import EncodedRows, FeatureDtype, encode_rows
from starsd_edge.protocol.greeting import HelloBody, Identity, WelcomeBody
from starsd_edge.protocol.messages import (
    Busy,
    BusyReason,
    Close,
    Draft,
    Error,
    ErrorCode,
    GoAway,
    Head,
    Hello,
    Hints,
    Message,
    NeedPrefill,
    Open,
    Ping,
    Pong,
    Prefill,
    PrefillAck,
    Report,
    Update,
    Welcome,
)
from starsd_edge.protocol.telemetry import EdgeReport, EdgeSession, Mode, Stage, Work

U16, U32, U64 = (st.integers(0, 2**bits - 1) for bits in (16, 32, 64))
AHEAD = st.integers(0, 256)
LENGTHS = st.integers(1, 100_000)
TOKENS = st.integers(0, 2**24 - 1)


@st.composite
def heads(draw: st.DrawFn, min_len: int = 0) -> Head:
    base_len = draw(st.integers(min_len, 100_000))
    return Head(draw(U64), draw(U64), draw(U32), draw(U32), base_len, draw(U32))


@st.composite
def encoded_rows(draw: st.DrawFn, rows: int) -> EncodedRows:
    width = draw(st.integers(1, 130))
    seed = draw(st.integers(0, 2**32 - 1))
    scale = draw(st.sampled_from([1e-6, 1.0, 900.0]))
    features = np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32) * scale
    return encode_rows(features.astype(np.float32), draw(st.sampled_from(FeatureDtype)))


@st.composite
def token_arrays(draw: st.DrawFn, size: int) -> np.ndarray:
    return np.array(draw(st.lists(TOKENS, min_size=size, max_size=size)), np.int32)


@st.composite
def updates(draw: st.DrawFn) -> Prefill | Update:
    n = draw(st.integers(0, 9))
    head = draw(heads(min_len=n + 1))
    tokens, rows = draw(token_arrays(n)), draw(encoded_rows(n))
    if n and draw(st.booleans()):
        return Prefill(head, tokens, rows)
    hints = Hints(
        draw(st.integers(1, 256)),
        draw(U16),
        draw(U16),
        draw(AHEAD),
        draw(U32),
        draw(U32),
        draw(U32),
        draw(U32),
    )
    return Update(head, tokens, rows, hints)


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    n = draw(st.integers(0, 63))
    parents = np.array([draw(st.integers(0, node)) for node in range(n)], np.int32)
    return Draft(
        draw(heads(min_len=1)), draw(token_arrays(n)), parents, draw(U32), draw(U32), draw(st.booleans())
    )


@st.composite
def identities(draw: st.DrawFn) -> Identity:
    names, hashes = st.text(max_size=40), st.text("0123456789abcdef", min_size=8, max_size=64)
    sizes = st.integers(1, 65535)
    layers = tuple(draw(st.lists(st.integers(-1, 80), min_size=1, max_size=3)))
    return Identity(
        target=draw(names),
        target_hash=draw(hashes),
        vocab_size=draw(st.integers(1, 2**24)),
        tokenizer_hash=draw(hashes),
        hidden_size=draw(sizes),
        feature_size=draw(sizes),
        feature_layers=layers,
        feature_norm=draw(st.booleans()),
        projection=draw(st.just(msgspec.UNSET) | hashes),
    )


@st.composite
def hellos(draw: st.DrawFn) -> Hello:
    identity = draw(identities())
    body = HelloBody(
        identity=identity,
        digest=identity.digest(),
        device=draw(st.text(max_size=40)),
        software="0.1.0",
        dtypes=["fp16", "int8"],
        max_len=draw(LENGTHS),
        max_nodes=60,
        cost_sizes=[1, 2],
        cost_seconds=[0.5, 0.75],
    )
    return Hello(draw(heads()), body)


@st.composite
def welcomes(draw: st.DrawFn) -> Welcome:
    body = WelcomeBody(
        service=draw(st.text(max_size=40)),
        software="0.1.0",
        head="smollm2",
        digest="00" * 32,
        dtype="fp16",
        max_len=draw(LENGTHS),
        max_nodes=60,
    )
    return Welcome(draw(heads()), body)


@st.composite
def opens(draw: st.DrawFn) -> Open:
    head = Head(draw(U64), draw(U64), draw(U32), draw(U32), 1, draw(U32))
    return Open(head, draw(TOKENS))


@st.composite
def reports(draw: st.DrawFn) -> EdgeReport:
    durations = Histogram()
    for value in draw(st.lists(st.floats(1e-5, 10), max_size=5)):
        durations.add(value)
    work = Work(tokens=draw(U32), fallbacks={"late": draw(U16)}, stages={Stage.VERIFY: durations})
    session = EdgeSession("07", draw(st.sampled_from(Mode)), draw(st.text(max_size=40)), work)
    return EdgeReport("boot", sessions=[session], reconnects=draw(U16))


def messages() -> st.SearchStrategy[Message]:
    """Any message of the protocol."""
    return st.one_of(
        hellos(),
        welcomes(),
        opens(),
        updates(),
        drafts(),
        st.builds(PrefillAck, heads()),
        st.builds(NeedPrefill, heads()),
        st.builds(Busy, heads(), U32, st.sampled_from(BusyReason)),
        st.builds(Ping, heads(), U64, st.binary(max_size=200)),
        st.builds(Pong, heads(), U64, U32),
        st.builds(Report, heads(), reports()),
        st.builds(Close, heads()),
        st.builds(GoAway, heads(), U32),
        st.builds(
            Error, heads(), st.sampled_from(ErrorCode), st.text("abc é", max_size=40), st.integers(0, 255)
        ),
    )

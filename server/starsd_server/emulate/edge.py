"""The service's client as an emulated edge needs it: one session over a DEALER socket, messages by hand.

Far simpler than the real client (`starsd_edge.link`): it never loses its connection and asks again only where
it is told to.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

import numpy as np
import zmq

from starsd_edge.decoding.costs import CostCurve
from starsd_edge.decoding.prefix import prefix_crc
from starsd_edge.link.sockets import EdgeKeys, SyncSocket, edge_socket
from starsd_edge.protocol.codec import Frames, decode, encode
from starsd_edge.protocol.features import EncodedRows, FeatureDtype, encode_rows
from starsd_edge.protocol.greeting import HelloBody, Identity
from starsd_edge.protocol.messages import (
    Close,
    Head,
    Hello,
    Hints,
    Message,
    Open,
    Ping,
    Prefill,
    Update,
    Welcome,
)
from starsd_edge.types import FeatureArray, TokenArray

__all__ = ["EdgeSide", "EmulatedEdge"]


class EdgeSide:
    """One session of one device, whatever carries its messages: `send` takes frames, `take` gets them."""

    def __init__(
        self,
        send: Callable[[Frames], object],
        identity: Identity,
        device: str,
        *,
        curve: CostCurve | None = None,
        dtype: FeatureDtype = FeatureDtype.FP16,
        max_nodes: int = 60,
    ) -> None:
        self.session = secrets.randbits(64)
        self.tokens: TokenArray = np.empty(0, np.int32)  # committed, root included
        self._send_frames = send
        self.device = device
        self._identity, self._curve, self._dtype = identity, curve, dtype
        self._max_nodes = max_nodes
        self._boot_id = self._epoch = self._round = 0
        self.bytes_up = self.bytes_down = 0

    def hello(self) -> None:
        body = HelloBody(
            identity=self._identity,
            digest=self._identity.digest(),
            device=self.device,
            software="emulated",
            dtypes=[self._dtype.wire_name],
            max_len=1 << 16,
            max_nodes=self._max_nodes,
            cost_sizes=list(self._curve.sizes) if self._curve else [],
            cost_seconds=list(self._curve.seconds) if self._curve else [],
        )
        self._send(Hello(Head(self.session), body))

    def open(self, first_token: int) -> int:
        """Begin a context; the round that its acknowledgement will name."""
        self.tokens = np.array([first_token], np.int32)
        self._epoch += 1
        return self._request(lambda head: Open(head, first_token))

    def prefill(self, tokens: TokenArray, features: FeatureArray) -> int:
        """Rows [n] of a prompt, on top of what is committed."""
        rows = self._commit(tokens, features)
        return self._request(lambda head: Prefill(head, tokens, rows))

    def update(self, tokens: TokenArray, features: FeatureArray, hints: Hints) -> int:
        """Newly committed rows; a tree on top of them is wanted."""
        rows = self._commit(tokens, features)
        return self._request(lambda head: Update(head, tokens, rows, hints))

    def ping(self, nonce: int) -> None:
        self._send(Ping(Head(self.session, self._boot_id), nonce))

    def leave(self) -> None:
        self._send(Close(Head(self.session, self._boot_id)))

    def take(self, frames: Frames) -> Message:
        """What the service said in `frames`."""
        self.bytes_down += sum(map(len, frames))
        message = decode(frames)
        if isinstance(message, Welcome):
            self._boot_id = message.head.boot_id
        return message

    def _commit(self, tokens: TokenArray, features: FeatureArray) -> EncodedRows:
        self.tokens = np.concatenate([self.tokens, tokens])
        return encode_rows(features, self._dtype)

    def _request(self, build: Callable[[Head], Message]) -> int:
        self._round += 1
        length = len(self.tokens)
        head = Head(self.session, self._boot_id, self._epoch, self._round, length, prefix_crc(self.tokens))
        self._send(build(head))
        return self._round

    def _send(self, message: Message) -> None:
        frames = encode(message)
        self.bytes_up += sum(map(len, frames))
        self._send_frames(frames)


class EmulatedEdge(EdgeSide):
    """An EdgeSide over a real socket. Every request returns at once; `receive` gives what came back."""

    def __init__(
        self,
        context: zmq.Context[SyncSocket],
        address: str,
        identity: Identity,
        device: str,
        *,
        curve: CostCurve | None = None,
        keys: EdgeKeys | None = None,
        max_nodes: int = 60,
    ) -> None:
        self.socket = edge_socket(context, keys)
        self.socket.connect(address)
        super().__init__(self.socket.send_multipart, identity, device, curve=curve, max_nodes=max_nodes)

    def receive(self, timeout_ms: int = 0) -> Message | None:
        """The next message of the service, waiting up to `timeout_ms`; None when there is none."""
        if not self.socket.poll(timeout_ms):
            return None
        return self.take(self.socket.recv_multipart())

    def close(self) -> None:
        self.leave()
        self.socket.close()

"""The body of a request: bounded in size and time, and by the end of the server."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from starsd_edge.endpoint.openai import RequestError
from starsd_edge.endpoint.worker import StoppingError

__all__ = ["BODY_TIMEOUT_S", "MAX_BODY_BYTES", "BodyReader", "UnreadError"]

MAX_BODY_BYTES = 4 << 20  # far more text than any context holds
BODY_TIMEOUT_S = 30.0  # a body comes in one go; one that does not holds its connection no longer


class UnreadError(StoppingError):
    """Raised when the server ends in the middle of a body: its client still sends."""


class BodyReader:
    """Reads bodies until it is stopped. For one event loop."""

    def __init__(self, timeout_s: float = BODY_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._under_way: set[asyncio.Future[bytes]] = set()
        self._stopped = False

    @property
    def num_under_way(self) -> int:
        return len(self._under_way)

    async def read(self, request: Request) -> bytes:
        """All of it. Raises RequestError when it is too large or too slow, UnreadError at the server's
        end, ClientDisconnect."""
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length) > MAX_BODY_BYTES:
            raise _too_large()
        if self._stopped:
            raise UnreadError
        reading = asyncio.ensure_future(_parts(request))
        self._under_way.add(reading)
        try:
            await asyncio.wait((reading,), timeout=self._timeout_s)
            if reading.cancelled():
                raise UnreadError
            if not reading.done():
                raise RequestError(
                    f"the body was not there after {self._timeout_s:g} s: send it in one go",
                    code="body_too_slow",
                )
            return reading.result()
        finally:
            reading.cancel()
            self._under_way.discard(reading)

    def stop(self) -> None:
        """Wait for none that is under way, or comes."""
        self._stopped = True
        for reading in self._under_way:
            reading.cancel()


async def _parts(request: Request) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise _too_large()
    return bytes(body)


def _too_large() -> RequestError:
    return RequestError(f"the body exceeds {MAX_BODY_BYTES} bytes", code="body_too_large")

"""An answer to a request whose body is still being sent, and is not wanted.

Of a connection that is closed while its client writes, many clients see a reset and never the answer
(RFC 9112, section 9.6): the answer goes out at once, and what still comes is thrown away for a moment.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

__all__ = ["LingeringResponse"]

LINGER_S = 5.0  # a client that sends for longer than this does not read


class LingeringResponse(Response):
    """A whole response, in JSON; its connection ends when the request does, or after `linger_s`."""

    media_type = "application/json"

    def __init__(
        self, content: bytes, status: int, headers: Mapping[str, str] | None, linger_s: float = LINGER_S
    ) -> None:
        super().__init__(content, status, headers)
        self._linger_s = linger_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(_discard(receive), self._linger_s)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _discard(receive: Receive) -> None:
    while (await receive()).get("more_body", False):  # a disconnect has none
        pass

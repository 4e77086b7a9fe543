"""Who may ask: an API key off loopback, and on loopback nobody but programs of this machine.

A web page can send requests to 127.0.0.1 from its visitor's browser. Without a key, requests are only taken
that name this machine as their host and come from no foreign origin.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.datastructures import Headers

__all__ = ["Guard", "Refusal"]

LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]", "::1"})


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not answered."""

    status: int
    message: str
    kind: str


@dataclass(frozen=True, slots=True)
class Guard:
    """api_key "" takes requests without one. `origins` are web pages that may ask."""

    api_key: str = ""
    origins: Sequence[str] = ()

    def refuse(self, headers: Headers) -> Refusal | None:
        """None for a request that may be answered."""
        origin = headers.get("origin")
        if origin is not None and origin not in self.origins:
            return Refusal(403, f"pages of {origin} may not ask this server", "permission_error")
        if not self.api_key:
            if _host(headers.get("host", "")) not in LOCAL_HOSTS:
                return Refusal(
                    403, "this server only answers to the name of this machine", "permission_error"
                )
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        # Compared in constant time: how far a guess is right must not show.
        right = hmac.compare_digest(given.strip().encode(), self.api_key.encode())
        if scheme.lower() != "bearer" or not right:
            return Refusal(401, "the API key is missing or wrong", "authentication_error")
        return None


def _host(value: str) -> str:
    """The name in a Host header, less the port."""
    if value.startswith("["):
        return value.partition("]")[0] + "]"
    return value.rpartition(":")[0] or value

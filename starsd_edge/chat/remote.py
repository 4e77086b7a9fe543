"""A `starsd serve` as a chat's backend: the model is loaded once and used by many programs."""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import json
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any
from urllib.parse import urlsplit

from starsd_edge.chat.answer import AnswerEnd, AnswerEvent, AnswerPiece, AnswerStart, Figures, FinishReason
from starsd_edge.chat.settings import ChatSettings
from starsd_edge.chat.status import LinkState, LinkStatus
from starsd_edge.decoding.sampling import SamplingParams
from starsd_edge.errors import AuthenticationError, StarSDError, UnreachableError, UsageError
from starsd_edge.text.template import Message

__all__ = ["RemoteBackend", "find_server"]

CONNECT_TIMEOUT_S = 5.0
# The server sends a comment every ten seconds while it reads a prompt; without three of them it is lost.
READ_TIMEOUT_S = 30.0
HEALTH_TIMEOUT_S = 0.3  # asked between keystrokes
HEALTH_EVERY_S = 1.0
WAY_ON = "start it again with `starsd serve`, or chat without it: --attach off"


def find_server(url: str) -> str | None:
    """The model's name if a `starsd serve` answers at `url`, else None."""
    with contextlib.suppress(OSError, ValueError, http.client.HTTPException, UsageError):
        health = _get(_Address(url), "/health", "", HEALTH_TIMEOUT_S)
        if health.get("status") == "ok" and "link" in health:
            return str(health["model"])
    return None


class RemoteBackend:
    """A `Backend` over HTTP. `sampling` is what the server does unless told otherwise.

    url      http://127.0.0.1:PORT, or https:// anywhere
    api_key  "" for none

    Raises UnreachableError when nothing answers, UsageError for a URL that is none.
    """

    def __init__(self, url: str, api_key: str = "") -> None:
        self._address = _Address(url)
        self._api_key = api_key
        self._socket: socket.socket | None = None
        self._cancelled = False
        self._link = LinkStatus(LinkState.NONE)
        self._link_read_s = float("-inf")
        try:
            cards = _get(self._address, "/v1/models", api_key, CONNECT_TIMEOUT_S)["data"]
            self.model = str(cards[0]["id"])
            self.max_len = int(cards[0].get("max_model_len", 0))
            self.sampling = SamplingParams(**cards[0].get("sampling", {}))
        except (OSError, http.client.HTTPException) as error:
            raise UnreachableError(
                f"no server answers at {url} ({error}): start one with `starsd serve`"
            ) from error
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise UnreachableError(f"what answers at {url} is no `starsd serve`") from error

    def answer(self, messages: Sequence[Message], settings: ChatSettings) -> Iterator[AnswerEvent]:
        """See `Backend.answer`."""
        self._cancelled = False
        connection = self._address.connect(READ_TIMEOUT_S)
        try:
            connection.request(
                "POST", "/v1/chat/completions", _body(self.model, messages, settings), _headers(self._api_key)
            )
            self._socket = connection.sock
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise _refusal(response.status, response.read())
            yield AnswerStart(0, 0, 0)
            yield from self._read(response)
        except (OSError, http.client.HTTPException) as error:
            if not self._cancelled:
                raise UnreachableError(f"the server stopped answering ({error}): {WAY_ON}") from error
            yield AnswerEnd(FinishReason.CANCELLED, Figures())
        finally:
            self._socket = None
            connection.close()

    def cancel(self) -> None:
        """Hang up: the server notices and ends the answer."""
        self._cancelled = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def link(self) -> LinkStatus:
        """As the server told it last; asked again once a second, but not during an answer."""
        now_s = time.monotonic()
        if self._socket is None and now_s - self._link_read_s > HEALTH_EVERY_S:
            self._link_read_s = now_s
            self._link = self._read_link()
        return self._link

    def close(self) -> None:
        """Nothing stays open between answers."""

    def _read(self, response: http.client.HTTPResponse) -> Iterator[AnswerEvent]:
        reason = FinishReason.STOP
        figures, num_dropped, num_pieces = Figures(), 0, 0
        for event in self._events(response):
            if "error" in event:
                raise StarSDError(str(event["error"].get("message", event["error"])))
            for choice in event.get("choices", ()):
                text = choice["delta"].get("content", "")
                if text:
                    num_pieces += 1
                    yield AnswerPiece(text)
                if choice["finish_reason"] is not None:
                    reason = FinishReason(choice["finish_reason"])
            if event.get("usage"):
                figures, num_dropped = _figures(event), int(event.get("dropped_messages", 0))
        if self._cancelled:
            reason = FinishReason.CANCELLED
            figures.completion_tokens = figures.completion_tokens or num_pieces
        yield AnswerEnd(reason, figures, num_dropped)

    def _events(self, response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
        """Server-sent events with JSON, up to [DONE]. Raises ConnectionError where that is missing: an answer
        that broke off is not one that is over."""
        while (line := response.readline()).endswith(b"\n"):
            if line.startswith(b"data: "):
                data = line[len(b"data: ") :].strip()
                if data == b"[DONE]":
                    return
                yield json.loads(data)
        if not self._cancelled:
            raise ConnectionError("it hung up in the middle of an answer")

    def _read_link(self) -> LinkStatus:
        try:
            health = _get(self._address, "/health", self._api_key, HEALTH_TIMEOUT_S)
            state = LinkState[str(health["link"]).upper()]
            return LinkStatus(
                state, health["service"], health["link_reason"], health["link_wait_s"], health["link_local"]
            )
        except (OSError, ValueError, KeyError, http.client.HTTPException):
            return LinkStatus(LinkState.NO_SERVER, "", "the server does not answer")


class _Address:
    """Where a server is. Raises UsageError for what is no URL, and for plain HTTP to another machine."""

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError as error:
            raise _no_address(url) from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise _no_address(url)
        if parts.scheme == "http" and not _is_loopback(parts.hostname):
            raise UsageError(f"{url}: off this machine a chat is only sent through https")
        self._host, self._port, self._secure = parts.hostname, port, parts.scheme == "https"

    def connect(self, timeout_s: float) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=timeout_s)


def _no_address(url: str) -> UsageError:
    return UsageError(
        f"{url!r} is no address of a server: http://127.0.0.1:PORT or https://HOST, port 1 to 65535"
    )


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _get(address: _Address, path: str, api_key: str, timeout_s: float) -> Any:
    connection = address.connect(timeout_s)
    try:
        connection.request("GET", path, headers=_headers(api_key))
        response = connection.getresponse()
        body = response.read()
        if response.status != http.client.OK:
            raise _refusal(response.status, body)
        return json.loads(body)
    finally:
        connection.close()


def _headers(api_key: str) -> dict[str, str]:
    headers = {"Content-Type": "application/json"}
    return {**headers, "Authorization": f"Bearer {api_key}"} if api_key else headers


def _body(model: str, messages: Sequence[Message], settings: ChatSettings) -> bytes:
    request = {
        "model": model,
        "messages": [{"role": m.role.value, "content": m.content} for m in messages],
        **asdict(settings.sampling),
        "max_tokens": settings.max_tokens,
        "stop": list(settings.stop) or None,
        "stream": True,
        "stream_options": {"include_usage": True},
        "draft": settings.draft,
        "full_window": settings.full_window.value,
    }
    return json.dumps(request).encode()


def _refusal(status: int, body: bytes) -> StarSDError:
    """What the server said instead of an answer."""
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"the server answered with status {status}"
    if status in (http.client.UNAUTHORIZED, http.client.FORBIDDEN):
        return AuthenticationError(f"{message}: set STARSD_API_KEY")
    if http.client.BAD_REQUEST <= status < http.client.INTERNAL_SERVER_ERROR:
        return UsageError(message)
    return StarSDError(message)


def _figures(event: dict[str, Any]) -> Figures:
    """The server's figures, from vLLM's and llama.cpp's shapes."""
    usage, metrics = event["usage"], event["metrics"]
    verified: Counter[tuple[int, int]] = Counter()
    by_length = metrics["speculative_decoding"]["acceptance_histogram_by_draft_length"]
    for drafted, histogram in by_length.items():
        verified.update({(int(drafted), accepted): rounds for accepted, rounds in enumerate(histogram)})
    figures = Figures(
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        completion_tokens=usage["completion_tokens"],
        queue_s=metrics["queue_time_ms"] / 1e3,
        first_token_s=metrics["time_to_first_token_ms"] / 1e3,
        generation_s=metrics["generation_time_ms"] / 1e3,
        verified=+verified,
        joules=metrics["energy_joules"],
        settled=metrics.get("guard_steps", 0),
        settled_s=metrics.get("guard_time_ms", 0.0) / 1e3,
    )
    # Every round but those gave one token, and the prefill gave the first.
    rest = figures.completion_tokens - 1 - figures.accepted - figures.tree_rounds
    figures.plain_rounds = max(rest, 0)
    return figures

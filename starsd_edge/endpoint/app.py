"""The HTTP side of `starsd serve`: OpenAI's endpoints over one worker."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from starsd_edge.chat.answer import AnswerEnd, AnswerEvent, AnswerPiece
from starsd_edge.chat.settings import ChatSettings
from starsd_edge.chat.speaker import Speaker
from starsd_edge.endpoint.answers import DONE, AnswerBody, ChatBody, CompletionBody, Reply
from starsd_edge.endpoint.body import BodyReader, UnreadError
from starsd_edge.endpoint.fair_queue import QueueFullError
from starsd_edge.endpoint.guard import Guard
from starsd_edge.endpoint.lingering import LingeringResponse
from starsd_edge.endpoint.metrics import EndpointMetrics
from starsd_edge.endpoint.openai import (
    ModelCard,
    ModelList,
    RequestError,
    Sampling,
    error_body,
    read_chat_request,
    read_completion_request,
)
from starsd_edge.endpoint.requests import (
    chat_settings,
    completion_prompt,
    completion_settings,
    messages_of,
)
from starsd_edge.endpoint.worker import Delivery, Failure, Job, StoppingError, Worker
from starsd_edge.errors import ResourceError, StarSDError, UsageError

__all__ = ["Endpoint", "create_app"]

KEEP_ALIVE_S = 10.0  # a comment line this often while a prompt is read, for impatient proxies
RETRY_AFTER_S = 2  # what a client beyond the queue is told; about an answer's time
RETRY_STOPPED_S = 5  # a server that is started again has its model by then, or nearly
STOPPED_LINGER_S = 1.0  # less than the server has for its farewell
MAX_RANDOM_SEED = 2**63
CLIENT_GONE = 499  # nginx's number for it; HTTP has none


@dataclass(slots=True)
class Endpoint:
    """Everything the routes share. `defaults` stand in for what a request leaves out."""

    worker: Worker
    model_id: str
    defaults: ChatSettings
    guard: Guard
    created: int
    keep_alive_s: float = KEEP_ALIVE_S
    bodies: BodyReader = field(default_factory=BodyReader)
    metrics: EndpointMetrics = field(default_factory=EndpointMetrics)

    def stop(self) -> None:
        """The server's time is up: whoever has no whole answer is told StoppingError."""
        self.bodies.stop()
        self.worker.stop()

    async def models(self, request: Request) -> Response:
        return _json(ModelList([self._card()]))

    async def one_model(self, request: Request) -> Response:
        self._check_model(request.path_params["id"])
        return _json(self._card())

    async def chat(self, request: Request) -> Response:
        asked = read_chat_request(await self.bodies.read(request))
        self._check_model(asked.model)
        messages = messages_of(asked)
        settings = chat_settings(asked, self.defaults, secrets.randbelow(MAX_RANDOM_SEED))
        body = ChatBody(self._reply(asked, "chatcmpl"), self.worker.speaker.writer.tokenizer)
        return await self._answer(request, asked, body, lambda speaker: speaker.answer(messages, settings))

    async def completion(self, request: Request) -> Response:
        asked = read_completion_request(await self.bodies.read(request))
        self._check_model(asked.model)
        prompt = completion_prompt(asked, self.worker.speaker.writer.tokenizer.vocab_size)
        settings = completion_settings(asked, self.defaults, secrets.randbelow(MAX_RANDOM_SEED))
        body = CompletionBody(self._reply(asked, "cmpl"), self.worker.speaker.writer.tokenizer)

        def answer(speaker: Speaker) -> Iterator[AnswerEvent]:
            if isinstance(prompt, str):
                return speaker.answer_text(prompt, settings)
            return speaker.answer_tokens(prompt, settings)

        return await self._answer(request, asked, body, answer)

    async def health(self, request: Request) -> Response:
        link = self.worker.speaker.link()
        report = {
            "status": "ok",
            "model": self.model_id,
            "link": link.state.name.lower(),
            "link_reason": link.reason,
            "link_wait_s": link.wait_s,
            "link_local": link.local,
            "service": link.service,
            "waiting": self.worker.num_waiting,
        }
        return _json(report)

    async def exposition(self, request: Request) -> Response:
        text = self.metrics.exposition(
            waiting=self.worker.num_waiting,
            running=self.worker.is_busy,
            link_ready=self.worker.speaker.link().state.is_linked,
        )
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _answer(
        self,
        request: Request,
        asked: Sampling,
        body: AnswerBody,
        answer: Callable[[Speaker], Iterator[AnswerEvent]],
    ) -> Response:
        job, deliveries = _job(_client(request), answer)
        self.worker.submit(job)
        if not asked.stream:
            return await self._whole(request, job, deliveries, body)
        # An error before the first event is a proper status; later ones can only be a chunk.
        try:
            first = await _first_delivery(request, deliveries, self.keep_alive_s)
        except ClientDisconnect:
            self.worker.cancel(job)
            raise
        if isinstance(first, Failure):
            raise first.error
        return StreamingResponse(
            self._stream(job, first, deliveries, body),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )

    async def _whole(
        self, request: Request, job: Job, deliveries: asyncio.Queue[Delivery], body: AnswerBody
    ) -> Response:
        """The whole answer at once; ended early when the client goes away."""
        pieces: list[AnswerPiece] = []
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            while True:
                delivery = await _next_unless(gone, deliveries)
                if isinstance(delivery, Failure):
                    raise delivery.error
                if isinstance(delivery, AnswerPiece):
                    pieces.append(delivery)
                if isinstance(delivery, AnswerEnd):
                    self.metrics.answered(delivery.figures, delivery.reason.value)
                    return Response(body.whole(pieces, delivery), media_type="application/json")
        finally:
            gone.cancel()
            self.worker.cancel(job)

    async def _stream(
        self,
        job: Job,
        first: Delivery | None,
        deliveries: asyncio.Queue[Delivery],
        body: AnswerBody,
    ) -> AsyncIterator[bytes]:
        """Server-sent events. Ends the answer when the client goes away: then this is closed."""
        try:
            for chunk in body.opening():
                yield chunk
            delivery = first
            while not isinstance(delivery, AnswerEnd):
                if isinstance(delivery, AnswerPiece):
                    for chunk in body.chunk(delivery):
                        yield chunk
                elif isinstance(delivery, Failure):
                    self.metrics.refused("error")
                    yield b"data: " + error_body(delivery.error, "server_error") + b"\n\n"
                    return
                elif delivery is None:
                    yield b": still reading\n\n"
                delivery = await _within(self.keep_alive_s, deliveries)
            self.metrics.answered(delivery.figures, delivery.reason.value)
            for chunk in body.closing(delivery):
                yield chunk
            yield DONE
        finally:
            self.worker.cancel(job)

    def _reply(self, asked: Sampling, kind: str) -> Reply:
        return Reply(
            f"{kind}-{secrets.token_hex(12)}", int(time.time()), self.model_id, asked.wants_usage_chunk
        )

    def _card(self) -> ModelCard:
        return ModelCard(
            self.model_id, self.created, self.worker.speaker.max_len, asdict(self.defaults.sampling)
        )

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.model_id:
            raise RequestError(
                f"there is no model {name!r} here; this server has {self.model_id!r}",
                "model",
                "model_not_found",
            )


def create_app(endpoint: Endpoint) -> ASGIApp:
    """The ASGI application; errors of every kind become OpenAI's body."""
    app = Starlette(
        routes=[
            Route("/v1/models", endpoint.models, methods=["GET"]),
            Route("/v1/models/{id:path}", endpoint.one_model, methods=["GET"]),
            Route("/v1/chat/completions", endpoint.chat, methods=["POST"]),
            Route("/v1/completions", endpoint.completion, methods=["POST"]),
            Route("/health", endpoint.health, methods=["GET"]),
            Route("/metrics", endpoint.exposition, methods=["GET"]),
        ],
        exception_handlers={
            RequestError: _refuse_request,
            QueueFullError: _refuse_for_now,
            ClientDisconnect: _nobody_there,
            StoppingError: _refuse_at_the_end,
            StarSDError: _fail,
            404: _not_found,
            405: _not_found,
        },
    )
    guarded: ASGIApp = _Guarded(app, endpoint)
    if endpoint.guard.origins:
        guarded = CORSMiddleware(
            guarded, allow_origins=endpoint.guard.origins, allow_methods=["*"], allow_headers=["*"]
        )
    return guarded


class _Guarded:
    """Asks the guard before anything is read. `/health` is open: it tells nothing that is private."""

    def __init__(self, app: ASGIApp, endpoint: Endpoint) -> None:
        self._app = app
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/health":
            refusal = self._endpoint.guard.refuse(Request(scope).headers)
            if refusal is not None:
                self._endpoint.metrics.refused("forbidden")
                response = _error(UsageError(refusal.message), refusal.kind, refusal.status)
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _job(
    client: str, answer: Callable[[Speaker], Iterator[AnswerEvent]]
) -> tuple[Job, asyncio.Queue[Delivery]]:
    """A job whose events arrive in this event loop."""
    loop = asyncio.get_running_loop()
    deliveries: asyncio.Queue[Delivery] = asyncio.Queue()

    def deliver(delivery: Delivery) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server is going down
            loop.call_soon_threadsafe(deliveries.put_nowait, delivery)

    return Job(client, answer, deliver), deliveries


async def _first_delivery(
    request: Request, deliveries: asyncio.Queue[Delivery], timeout_s: float
) -> Delivery | None:
    """The first event; None when it takes long, so that the stream can begin with comments.

    Raises ClientDisconnect."""
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        return await asyncio.wait_for(_next_unless(gone, deliveries), timeout_s)
    except asyncio.TimeoutError:
        return None
    finally:
        gone.cancel()


async def _within(timeout_s: float, deliveries: asyncio.Queue[Delivery]) -> Delivery | None:
    try:
        return await asyncio.wait_for(deliveries.get(), timeout_s)
    except asyncio.TimeoutError:
        return None


async def _next_unless(gone: asyncio.Future[None], deliveries: asyncio.Queue[Delivery]) -> Delivery:
    """The next event. Raises ClientDisconnect when nobody waits for it any more."""
    getting = asyncio.ensure_future(deliveries.get())
    waits: tuple[asyncio.Future[Any], ...] = (getting, gone)
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if not getting.done():
            raise ClientDisconnect
        return getting.result()
    finally:
        getting.cancel()


async def _disconnected(request: Request) -> None:
    """Returns once the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _client(request: Request) -> str:
    """Whose turn in the queue a request uses: its API key's or user's, else its address."""
    return request.headers.get("authorization") or (request.client.host if request.client else "")


def _json(body: object) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


def _error(error: StarSDError, kind: str, status: int, headers: dict[str, str] | None = None) -> Response:
    return Response(error_body(error, kind), status, headers, media_type="application/json")


Handler = Callable[[Request, Exception], Awaitable[Response]]


async def _refuse_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    status = {"model_not_found": 404, "body_too_slow": 408, "body_too_large": 413}.get(error.code or "", 400)
    # The rest of such a body is not waited for.
    headers = {"Connection": "close"} if status in (408, 413) else None
    if status == 413:
        return LingeringResponse(error_body(error, "invalid_request_error"), status, headers)
    return _error(error, "invalid_request_error", status, headers)


async def _nobody_there(request: Request, error: Exception) -> Response:
    """The client hung up: what is answered reaches nobody, and is no fault of ours to be logged."""
    return Response(status_code=CLIENT_GONE)


async def _refuse_for_now(request: Request, error: Exception) -> Response:
    retry = {"Retry-After": str(RETRY_AFTER_S)}
    return _error(ResourceError(str(error)), "rate_limit_error", 429, retry)


async def _refuse_at_the_end(request: Request, error: Exception) -> Response:
    assert isinstance(error, StoppingError)
    headers = {"Retry-After": str(RETRY_STOPPED_S), "Connection": "close"}
    if isinstance(error, UnreadError):
        return LingeringResponse(error_body(error, "server_error"), 503, headers, STOPPED_LINGER_S)
    return _error(error, "server_error", 503, headers)


async def _fail(request: Request, error: Exception) -> Response:
    """What the caller asked wrongly is 400; everything else is ours."""
    assert isinstance(error, StarSDError)
    if isinstance(error, UsageError):
        return _error(error, "invalid_request_error", 400)
    return _error(error, "server_error", 500)


async def _not_found(request: Request, error: Exception) -> Response:
    return _error(
        UsageError(f"there is no {request.method} {request.url.path} here"), "invalid_request_error", 404
    )

"""OpenAI's request and response bodies. Pure: bytes to checked requests, values to response bytes.

Unknown fields are ignored, as servers of this API do; known ones that would change the answer and are not
supported are refused by name.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec

from starsd_edge.errors import StarSDError, UsageError

__all__ = [
    "ChatChoice",
    "ChatChunk",
    "ChatRequest",
    "ChatResponse",
    "ChunkChoice",
    "CompletionChoice",
    "CompletionRequest",
    "CompletionResponse",
    "Delta",
    "ErrorBody",
    "LogprobEntry",
    "Logprobs",
    "ModelCard",
    "ModelList",
    "OutMessage",
    "RequestError",
    "TextLogprobs",
    "Usage",
    "error_body",
    "read_chat_request",
    "read_completion_request",
]

# A conversation of years; each costs work however short it is, and the context keeps the newest alone.
MAX_MESSAGES = 10_000
MAX_STOPS = 4  # OpenAI's limit
MAX_TOP_LOGPROBS = 20  # OpenAI's limit


class RequestError(UsageError):
    """Raised for a request that cannot be answered; `param` names the field."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class ContentPart(msgspec.Struct):
    """One part of a message; only text is understood."""

    type: str
    text: str = ""


class InMessage(msgspec.Struct):
    role: str
    content: str | list[ContentPart] | None = None


class Sampling(msgspec.Struct, kw_only=True):
    """What both kinds of requests share. None: the model's default."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = 1
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    # Ours: use the draft service or not, and what to do with a conversation that outgrows the context.
    draft: bool | None = None
    full_window: str | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def wants_usage_chunk(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(Sampling, kw_only=True):
    messages: list[InMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    response_format: dict[str, Any] | None = None


class CompletionRequest(Sampling, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = False
    best_of: int | None = None
    suffix: str | None = None


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class LogprobEntry(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[LogprobEntry] | msgspec.UnsetType = msgspec.UNSET


class Logprobs(msgspec.Struct):
    content: list[LogprobEntry]
    refusal: None = None


class TextLogprobs(msgspec.Struct):
    """The older shape, of /v1/completions."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class OutMessage(msgspec.Struct):
    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct):
    message: OutMessage
    finish_reason: str
    logprobs: Logprobs | None = None
    index: int = 0


class ChatResponse(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    metrics: Any
    timings: Any
    dropped_messages: int = 0  # ours: old messages that no longer fit the context
    object: Literal["chat.completion"] = "chat.completion"
    system_fingerprint: str | None = None


class Delta(msgspec.Struct):
    role: Literal["assistant"] | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET


class ChunkChoice(msgspec.Struct):
    delta: Delta
    finish_reason: str | None = None  # null while the answer goes on: clients break on "" and on absence
    logprobs: Logprobs | None = None
    index: int = 0


class ChatChunk(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    metrics: Any = msgspec.UNSET
    timings: Any = msgspec.UNSET
    dropped_messages: int | msgspec.UnsetType = msgspec.UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    system_fingerprint: str | None = None


class CompletionChoice(msgspec.Struct):
    text: str
    finish_reason: str | None = None
    logprobs: TextLogprobs | None = None
    index: int = 0


class CompletionResponse(msgspec.Struct):
    """Whole answers and chunks of one have the same shape here."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    metrics: Any = msgspec.UNSET
    timings: Any = msgspec.UNSET
    object: Literal["text_completion"] = "text_completion"
    system_fingerprint: str | None = None


class ModelCard(msgspec.Struct):
    id: str
    created: int
    max_model_len: int
    sampling: Any  # ours: what stands in for what a request leaves out
    object: Literal["model"] = "model"
    owned_by: str = "starsd"


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: Literal["list"] = "list"


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    error: ErrorDetail


_T = TypeVar("_T", bound=Sampling)


def read_chat_request(body: bytes) -> ChatRequest:
    """A checked request. Raises RequestError that names the field."""
    request = _decode(body, ChatRequest)
    if request.tools or request.functions:
        raise RequestError("tools are not supported by this server: leave the field out", "tools")
    if request.response_format and request.response_format.get("type", "text") != "text":
        raise RequestError("only response_format {'type': 'text'} is supported", "response_format")
    if not request.messages:
        raise RequestError("messages must hold at least one message", "messages")
    if len(request.messages) > MAX_MESSAGES:
        raise RequestError(
            f"messages may hold {MAX_MESSAGES} messages, not {len(request.messages)}", "messages"
        )
    if request.top_logprobs is not None and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
    _check_count("top_logprobs", request.top_logprobs)
    if request.max_completion_tokens is not None:
        request.max_tokens = request.max_completion_tokens
    return _checked(request)


def read_completion_request(body: bytes) -> CompletionRequest:
    """A checked request. Raises RequestError that names the field."""
    request = _decode(body, CompletionRequest)
    if request.echo:
        raise RequestError("echo is not supported by this server", "echo")
    if request.suffix:
        raise RequestError("suffix is not supported by this server", "suffix")
    if request.best_of not in (None, 1):
        raise RequestError("best_of must be 1 on this server", "best_of")
    _check_count("logprobs", request.logprobs)
    return _checked(request)


def error_body(error: StarSDError, kind: str) -> bytes:
    """OpenAI's error body; `kind` is its `type`."""
    param = error.param if isinstance(error, RequestError) else None
    code = error.code if isinstance(error, RequestError) else None
    return msgspec.json.encode(ErrorBody(ErrorDetail(str(error), kind, param, code)))


def _decode(body: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(body, type=kind, strict=True)
    except msgspec.ValidationError as error:
        # "Expected `int`, got `str` - at `$.max_tokens`"
        text = str(error)
        param = text.rpartition("$.")[2].rstrip("`") if "$." in text else None
        raise RequestError(text, param) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from error


def _check_count(name: str, count: int | None) -> None:
    if count is not None and not 0 <= count <= MAX_TOP_LOGPROBS:
        raise RequestError(f"{name} must be between 0 and {MAX_TOP_LOGPROBS}", name)


def _checked(request: _T) -> _T:
    if request.n not in (None, 1):
        raise RequestError("n must be 1: this server answers one at a time", "n")
    if request.logit_bias:
        raise RequestError("logit_bias is not supported by this server", "logit_bias")
    if len(request.stops) > MAX_STOPS or not all(request.stops):
        raise RequestError(f"stop takes up to {MAX_STOPS} strings, none of them empty", "stop")
    if request.max_tokens is not None and request.max_tokens < 1:
        raise RequestError("max_tokens must be at least 1", "max_tokens")
    return request

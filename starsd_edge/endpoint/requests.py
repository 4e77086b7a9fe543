"""From a checked request to what the speaker is asked. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from starsd_edge.chat.settings import ChatSettings, FullWindow
from starsd_edge.decoding.sampling import SamplingParams
from starsd_edge.endpoint.openai import (
    ChatRequest,
    CompletionRequest,
    InMessage,
    RequestError,
    Sampling,
)
from starsd_edge.errors import UsageError
from starsd_edge.text.template import Message, Role

__all__ = ["chat_settings", "completion_prompt", "completion_settings", "messages_of"]

# "developer" is OpenAI's newer word for the system message.
ROLES = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
}
COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions


def messages_of(request: ChatRequest) -> list[Message]:
    """Raises RequestError for a role or content that is not understood."""
    messages = []
    for index, message in enumerate(request.messages):
        role = ROLES.get(message.role)
        if role is None:
            raise RequestError(
                f"role {message.role!r} is not supported: {', '.join(ROLES)}", f"messages[{index}].role"
            )
        messages.append(Message(role, _text(message, index)))
    return messages


def chat_settings(request: ChatRequest, defaults: ChatSettings, random_seed: int) -> ChatSettings:
    """`defaults` where the request says nothing. Raises RequestError for values out of range."""
    settings = _settings(request, defaults, random_seed)
    return replace(settings, logprobs=(request.top_logprobs or 0) if request.logprobs else None)


def completion_settings(request: CompletionRequest, defaults: ChatSettings, random_seed: int) -> ChatSettings:
    """Like `chat_settings`, with OpenAI's short default length."""
    settings = _settings(request, defaults, random_seed)
    return replace(settings, max_tokens=request.max_tokens or COMPLETION_TOKENS, logprobs=request.logprobs)


def completion_prompt(request: CompletionRequest, vocab_size: int) -> str | list[int]:
    """Text or tokens. Raises RequestError for several prompts (they would be several answers), and for
    numbers that are no tokens."""
    prompt: str | list[Any] = request.prompt
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if not prompt or not all(isinstance(token, int) for token in prompt):
        raise RequestError("prompt must be one text, or the tokens of one", "prompt")
    if not all(0 <= token < vocab_size for token in prompt):
        raise RequestError(f"tokens in prompt are numbers from 0 to {vocab_size - 1}", "prompt")
    return prompt


def _text(message: InMessage, index: int) -> str:
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    for part in message.content:
        if part.type != "text":
            raise RequestError(
                f"content of type {part.type!r} is not supported: text is", f"messages[{index}].content"
            )
    return "".join(part.text for part in message.content)


def _settings(request: Sampling, defaults: ChatSettings, random_seed: int) -> ChatSettings:
    base = defaults.sampling
    try:
        sampling = SamplingParams(
            temperature=_given(request.temperature, base.temperature),
            top_k=max(0, int(_given(request.top_k, base.top_k))),  # -1 is "all" elsewhere
            top_p=_given(request.top_p, base.top_p),
            min_p=_given(request.min_p, base.min_p),
            repetition_penalty=_given(request.repetition_penalty, base.repetition_penalty),
            presence_penalty=_given(request.presence_penalty, base.presence_penalty),
            frequency_penalty=_given(request.frequency_penalty, base.frequency_penalty),
            seed=random_seed if request.seed is None else request.seed % 2**64,
        )
    except UsageError as error:
        raise RequestError(str(error), str(error).split(" ", 1)[0]) from error
    settings = replace(
        defaults, sampling=sampling, max_tokens=request.max_tokens, stop=request.stops, system=""
    )
    if request.draft is not None:
        settings = replace(settings, draft=request.draft)
    if request.full_window is not None:
        rules = [rule.value for rule in FullWindow]
        if request.full_window not in rules:
            raise RequestError(f"full_window must be one of {', '.join(rules)}", "full_window")
        settings = replace(settings, full_window=FullWindow(request.full_window))
    return settings


def _given(value: float | None, default: float) -> float:
    return default if value is None else value

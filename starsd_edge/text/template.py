"""Chat templates: messages to the one text a model was trained on, through sandboxed jinja2.

Templates come with models and are data of strangers: they run in an immutable sandbox, see nothing but the
messages and the special tokens, and cannot change what they are given.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from starsd_edge.errors import BundleError, UsageError
from starsd_edge.text.builtin_templates import BUILTIN_TEMPLATES

__all__ = ["ChatTemplate", "Message", "Role"]


class Role(str, Enum):
    """Who speaks; the values are the words every chat template uses."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation."""

    role: Role
    content: str


class ChatTemplate:
    """A compiled template.

    source            jinja2 text, or the name of a built-in template ("vicuna_v1.1", "chatml")
    bos_token, eos_token  texts that the template may write; "" where the model has none
    now               what `strftime_now` in a template answers; without it the template sees no clock

    Raises BundleError when the template cannot be compiled.
    """

    def __init__(
        self, source: str, bos_token: str = "", eos_token: str = "", now: datetime | None = None
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        if now is not None:
            environment.globals["strftime_now"] = now.strftime
        try:
            self._template = environment.from_string(BUILTIN_TEMPLATES.get(source, source))
        except jinja2.TemplateError as error:
            raise BundleError(f"the model's chat template cannot be compiled: {error}") from error
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The prompt text.

        Raises UsageError when the template refuses these messages, BundleError when it fails.
        """
        plain = [{"role": message.role.value, "content": message.content} for message in messages]
        try:
            return self._template.render(
                messages=plain, add_generation_prompt=add_generation_prompt, **self._tokens
            )
        except TemplateRefusal as error:
            raise UsageError(f"the model's chat template refuses this conversation: {error}") from error
        except Exception as error:  # a template can fail like any program: a wrong type, no such key
            raise BundleError(f"the model's chat template fails: {error}") from error


class TemplateRefusal(jinja2.TemplateError):
    """What `raise_exception` in a template raises."""


def _refuse(message: str) -> NoReturn:
    raise TemplateRefusal(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    """jinja2's own filter escapes for HTML; models were trained on plain JSON."""
    return json.dumps(value, ensure_ascii=False, indent=indent)

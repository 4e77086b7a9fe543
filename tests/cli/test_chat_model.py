"""A chat with the embedded model: real tokenizer, real template, real text."""

from __future__ import annotations

import json

import pytest

from starsd_edge.bundle import Bundle
from starsd_edge.chat.answer import AnswerEnd, AnswerPiece, FinishReason
from starsd_edge.chat.conversation import Conversation
from starsd_edge.chat.settings import ChatSettings
from starsd_edge.cli.runtime import ModelChoice, open_speaker
from starsd_edge.text.template import Message, Role
from starsd_jetson import embedded

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def conversation() -> Conversation:
    choice = ModelChoice(threads=2)
    speaker = open_speaker(Bundle.open(embedded.bundle_path("int8")), choice, None, report=print)
    return Conversation(speaker, ChatSettings(max_tokens=40))


def ask(conversation: Conversation, text: str) -> tuple[str, AnswerEnd]:
    events = list(conversation.ask(text))
    assert isinstance(events[-1], AnswerEnd)
    return "".join(e.text for e in events if isinstance(e, AnswerPiece)), events[-1]


def test_two_turns_of_sense(conversation: Conversation) -> None:
    """A question that the source is sure of, by a logit at every token: what rounding makes of its near-ties,
    such as the capital of France, differs by the machine that made the int8 weights."""
    said, first = ask(conversation, "Tell me the capital of Japan.")
    assert "Tokyo" in said
    assert FinishReason.STOP is first.reason
    _, second = ask(conversation, "And of Italy? 🙂")
    assert second.figures.cached_tokens >= first.figures.prompt_tokens
    assert second.figures.prompt_tokens - second.figures.cached_tokens < 30


def test_prompts_are_those_of_the_model_s_authors(conversation: Conversation) -> None:
    """Token by token what transformers makes of the same file and messages."""
    from transformers import AutoTokenizer

    gguf = embedded.gguf_path()
    reference = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    told = [
        Message(Role.SYSTEM, "Be brief."),
        Message(Role.USER, "Größe, naïve café 你好 🙂👩‍👩‍👧‍👦  two  spaces\n\n\tdef f(x):\n    return 12345"),
        Message(Role.ASSISTANT, "It's 3.14, isn't it?"),
        Message(Role.USER, "Yes."),
    ]
    plain = json.loads(json.dumps([{"role": m.role.value, "content": m.content} for m in told]))
    expected = reference.apply_chat_template(plain, add_generation_prompt=True, return_dict=False)
    speaker = conversation.backend
    assert expected == list(speaker.writer.write(told).tokens)  # type: ignore[attr-defined]

"""Chat templates: Vicuna's prompt to the byte, the sandbox, readable refusals."""

from __future__ import annotations

from datetime import datetime

import pytest

from starsd_edge.errors import BundleError, UsageError
from starsd_edge.text.template import ChatTemplate, Message, Role

SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)


def messages(*contents: str, system: str | None = None) -> list[Message]:
    roles = [Role.USER, Role.ASSISTANT]
    start = [] if system is None else [Message(Role.SYSTEM, system)]
    return start + [Message(roles[i % 2], content) for i, content in enumerate(contents)]


@pytest.mark.parametrize(
    ("expected", "conversation"),
    [
        (f"{SYSTEM} USER: Hi ASSISTANT:", messages("Hi")),
        (f"{SYSTEM} USER: Hi ASSISTANT: Hello!</s>USER: More ASSISTANT:", messages("Hi", "Hello!", "More")),
        (f"{SYSTEM} USER: a\n b  ASSISTANT:", messages("a\n b ")),
        ("Be brief. USER: Hi ASSISTANT:", messages("Hi", system="Be brief.")),
    ],
)
def test_the_vicuna_prompt_is_fastchat_s_to_the_byte(expected: str, conversation: list[Message]) -> None:
    assert expected == ChatTemplate("vicuna_v1.1", eos_token="</s>").render(conversation)


def test_the_vicuna_prompt_begins_with_bos() -> None:
    assert ChatTemplate("vicuna_v1.1", "<s>", "</s>").render(messages("Hi")).startswith("<s>A chat")


def test_chatml() -> None:
    expected = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert expected == ChatTemplate("chatml").render(messages("Hi"))


def test_user_text_is_data_and_not_template() -> None:
    text = "{{ 7 * 7 }}{% raise %}<|im_end|>"
    assert text in ChatTemplate("chatml").render(messages(text))


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ cycler.__init__.__globals__.os.popen('true') }}",
        "{% include '/etc/passwd' %}",
        "{% for i in range(10000000) %}x{% endfor %}",
        "{{ strftime_now('%Y') }}",
    ],
)
def test_a_hostile_template_fails_instead_of_running(attack: str) -> None:
    with pytest.raises(BundleError, match="template"):
        ChatTemplate(attack).render(messages("Hi"))


def test_a_template_that_does_not_compile_is_named() -> None:
    with pytest.raises(BundleError, match="compiled"):
        ChatTemplate("{% if %}")


def test_a_template_s_own_refusal_reaches_the_user() -> None:
    template = ChatTemplate("{{ raise_exception('System role not supported') }}")
    with pytest.raises(UsageError, match="System role not supported"):
        template.render(messages("Hi"))


def test_the_date_is_the_caller_s() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=datetime(2025, 3, 1))
    assert "01 Mar 2025" == template.render([])


def test_json_and_loop_controls_are_what_templates_expect() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m | tojson }}{% break %}{% endfor %}")
    assert '{"role": "user", "content": "é<"}' == template.render(messages("é<", "b"))

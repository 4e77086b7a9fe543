"""Chat templates for models whose files carry none."""

from __future__ import annotations

from typing import Final

__all__ = ["BUILTIN_TEMPLATES"]

# FastChat's vicuna_v1.1 (Vicuna 1.1, 1.3 and 1.5): no space after the last "ASSISTANT:".
VICUNA_SYSTEM: Final = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
VICUNA_V1_1: Final = (
    "{{ bos_token }}"
    "{% if messages and messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}"
    "{% else %}" + VICUNA_SYSTEM + "{% endif %}{{ ' ' }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ 'USER: ' + message['content'] + ' ' }}"
    "{% elif message['role'] == 'assistant' %}{{ 'ASSISTANT: ' + message['content'] + eos_token }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)

CHATML: Final = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

BUILTIN_TEMPLATES: Final[dict[str, str]] = {"vicuna_v1.1": VICUNA_V1_1, "chatml": CHATML}

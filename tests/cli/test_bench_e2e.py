"""`starsd bench e2e` on a tiny model: turns build on answers, and what it says of a missing service."""

from __future__ import annotations

import time
from pathlib import Path

from click.testing import CliRunner

from starsd_edge.bench.e2e import Question
from starsd_edge.cli.bench_e2e import command, converse, greedy
from starsd_edge.decoding.decoder import Decoder
from starsd_edge.decoding.policy import FixedPolicy, PlainPolicy
from starsd_edge.errors import ConfigError
from starsd_edge.text.prompt import PromptWriter
from starsd_edge.text.template import ChatTemplate
from tests.core.chat.toys import TOKENIZER, CountingTarget

WRITER = PromptWriter(TOKENIZER, ChatTemplate("chatml", "", ""))


def test_a_second_turn_is_asked_after_the_first_was_answered() -> None:
    """Both ways of decoding say the same, in other numbers of rounds."""
    question = Question(1, "x", ("the fox", "and the dog"))
    answers = []
    for policy in (PlainPolicy(), FixedPolicy(4, wants_lookup=True)):
        decoder = Decoder(CountingTarget(script="the quick fox. " * 30), None, policy, time.monotonic)
        answer = converse(WRITER, greedy(decoder, frozenset()), 40, 400, frozenset())(question)
        answers.append(answer)
    plain, drafted = answers
    assert plain.tokens == drafted.tokens
    assert len(plain.tokens) == 80
    assert plain.rounds == 78  # the first token of a turn comes with its prompt
    assert drafted.rounds < plain.rounds
    assert plain.first_token_s is not None
    assert 0 < plain.first_token_s < plain.seconds


def test_the_questions_are_read_before_anything_is_loaded(tmp_path: Path) -> None:
    arguments = ["--prompts", str(tmp_path / "none.jsonl"), "--service", "tcp://127.0.0.1:9"]
    result = CliRunner().invoke(command, arguments)
    assert isinstance(result.exception, ConfigError)
    assert "none.jsonl" in str(result.exception)

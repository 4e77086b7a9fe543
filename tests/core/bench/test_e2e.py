"""The end-to-end benchmark: reading questions, asking in turns, counting alike."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from starsd_edge.bench.e2e import Answer, Question, compare, read_questions, summarise
from starsd_edge.errors import ConfigError

FIRST, SECOND = Question(1, "writing", ("a", "b")), Question(2, "coding", ("c",))


def line(number: int, category: str, turns: object) -> str:
    return json.dumps({"question_id": number, "category": category, "turns": turns, "reference": ["x"]})


def test_questions_are_read_as_spec_bench_writes_them(tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    lines = [line(1, "writing", ["a", "b"]), "", line(2, "coding", ["c"]), line(3, "coding", ["d"])]
    file.write_text("\n".join(lines))
    assert [FIRST, SECOND, Question(3, "coding", ("d",))] == read_questions(file)
    assert [FIRST, SECOND] == read_questions(file, limit=1)


@pytest.mark.parametrize(
    ("complaint", "text"),
    [
        (":1: no question", "{"),
        (":1: no question", '{"category": "x", "turns": ["a"]}'),
        (":1: no question", '["a"]'),
        (":2: turns is a list", line(1, "x", ["a"]) + "\n" + line(2, "x", [])),
        (":1: turns is a list", line(1, "x", ["a", 3])),
        ("holds no questions", "\n"),
    ],
)
def test_a_file_that_holds_something_else_is_refused_with_its_line(
    tmp_path: Path, complaint: str, text: str
) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        read_questions(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_questions(tmp_path / "missing")


def test_everybody_answers_every_question_and_nobody_is_always_first() -> None:
    asked: list[str] = []

    def way(name: str) -> Callable[[Question], Answer]:
        def answer(question: Question) -> Answer:
            asked.append(f"{name}{question.number}")
            return Answer([1, 2], 1.0, 0.1)

        return answer

    compared = list(compare([FIRST, SECOND], {"p": way("p"), "s": way("s")}))
    assert ["p1", "s1", "s2", "p2"] == asked
    assert [{"p", "s"}] * 2 == [set(each.answers) for each in compared]


def test_tokens_are_counted_alike_and_speed_ups_are_means_of_ratios() -> None:
    """Two turns: two tokens came with the prompts, the other six in four rounds."""
    plain = {1: Answer(list(range(8)), 8.0, 0.5, 6), 2: Answer([1, 2, 3], 1.0, 0.1, 2)}
    fast = {1: Answer(list(range(8)), 2.0, 0.5, 4), 2: Answer([1, 2, 4], 0.5, 0.1, 1)}
    peer = {1: Answer([9], 1.0, 1.0), 2: Answer([1, 2, 3], 1.0, 1.0)}
    ways = {
        name: (lambda question, answers=answers: answers[question.number])
        for name, answers in {"fast": fast, "peer": peer, "plain": plain}.items()
    }
    rows = {
        (row.way, row.category): row for row in summarise(list(compare([FIRST, SECOND], ways)), "plain").rows
    }
    writing = rows["fast", "writing"]
    assert (4.0, 4.0, 6 / 4, 1) == (
        writing.tokens_per_s,
        writing.speedup,
        writing.acceptance_length,
        writing.identical,
    )
    overall = rows["fast", "overall"]
    assert (2, 5.0, 3.0, 1) == (overall.questions, overall.tokens_per_s, overall.speedup, overall.identical)
    assert rows["plain", "overall"].speedup == 1.0
    assert rows["plain", "overall"].identical == 2
    assert rows["peer", "writing"].acceptance_length is None
    assert next(iter(rows))[0] == "plain"

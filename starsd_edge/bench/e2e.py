"""Spec-Bench style: questions by category, answered plainly and with drafts, by the same model in turns.

Tokens are counted alike on both sides: what was committed, the stop token included, nothing past it. Speed is
tokens over the whole time of an answer, its prompt included; a category's is the mean over its questions.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from starsd_edge.errors import ConfigError

__all__ = ["Answer", "Category", "Compared", "Question", "Report", "compare", "read_questions", "summarise"]

OVERALL = "overall"


@dataclass(frozen=True, slots=True)
class Question:
    """One line of the file: `turns` are what the user says, one after the other."""

    number: int
    category: str
    turns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """All turns of a question, answered.

    tokens         committed, of all turns
    seconds        from the question to the last token
    first_token_s  of the first turn; None where it is not known
    rounds         target forwards, the prompts' left out; 0: not known
    joules         used by the whole device meanwhile; None where its board reports no power
    """

    tokens: list[int]
    seconds: float
    first_token_s: float | None
    rounds: int = 0
    joules: float | None = None

    @property
    def tokens_per_s(self) -> float:
        return len(self.tokens) / self.seconds


Answerer = Callable[[Question], Answer]


@dataclass(frozen=True, slots=True)
class Compared:
    """One question, answered by everybody: `answers` by name."""

    question: Question
    answers: dict[str, Answer]


@dataclass(frozen=True, slots=True)
class Category:
    """One way of decoding on one category.

    speedup            over the baseline, question by question
    acceptance_length  None where rounds are not counted
    first_token_ms     None where a way does not tell
    identical          texts equal to the baseline's
    joules_per_token   None where the board reports no power
    """

    way: str
    category: str
    questions: int
    tokens_per_s: float
    speedup: float
    acceptance_length: float | None
    identical: int
    first_token_ms: float | None
    joules_per_token: float | None


@dataclass(frozen=True, slots=True)
class Report:
    """Per way and category, the overall row of each way last."""

    baseline: str
    rows: tuple[Category, ...]

    def as_dict(self) -> dict[str, object]:
        return {"baseline": self.baseline, "rows": [asdict(row) for row in self.rows]}


def read_questions(file: Path, limit: int | None = None) -> list[Question]:
    """The questions of a JSONL file, `limit` of each category. Raises ConfigError that names the line."""
    questions: list[Question] = []
    taken: dict[str, int] = {}
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
            turns = tuple(data["turns"])
            question = Question(int(data["question_id"]), str(data["category"]), turns)
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{file}:{number}: no question with question_id, category and turns ({error})"
            ) from None
        if not turns or not all(isinstance(turn, str) and turn for turn in turns):
            raise ConfigError(f"{file}:{number}: turns is a list of texts, none of them empty")
        taken[question.category] = taken.get(question.category, 0) + 1
        if limit is None or taken[question.category] <= limit:
            questions.append(question)
    if not questions:
        raise ConfigError(f"{file} holds no questions")
    return questions


def compare(questions: Sequence[Question], ways: dict[str, Answerer]) -> Iterator[Compared]:
    """Every question answered every way, in another order each time: what drifts, drifts for all."""
    names = list(ways)
    for place, question in enumerate(questions):
        order = names[place % len(names) :] + names[: place % len(names)]
        yield Compared(question, {name: ways[name](question) for name in order})


def summarise(compared: Sequence[Compared], baseline: str) -> Report:
    """Means over the questions of each category, and over all."""
    categories = list(dict.fromkeys(each.question.category for each in compared))
    ways = list(compared[0].answers)
    ways.sort(key=lambda way: way != baseline)
    rows = [
        _row(
            way,
            category,
            [each for each in compared if category in (OVERALL, each.question.category)],
            baseline,
        )
        for way in ways
        for category in [*categories, OVERALL]
    ]
    return Report(baseline, tuple(rows))


def _row(way: str, category: str, compared: Sequence[Compared], baseline: str) -> Category:
    answers = [each.answers[way] for each in compared]
    bases = [each.answers[baseline] for each in compared]
    rounds = sum(answer.rounds for answer in answers)
    # A prompt's forward gives a turn's first token and is no round.
    in_rounds = sum(len(each.answers[way].tokens) - len(each.question.turns) for each in compared)
    return Category(
        way=way,
        category=category,
        questions=len(compared),
        tokens_per_s=statistics.fmean(answer.tokens_per_s for answer in answers),
        speedup=statistics.fmean(
            answer.tokens_per_s / base.tokens_per_s for answer, base in zip(answers, bases, strict=True)
        ),
        acceptance_length=in_rounds / rounds if rounds else None,
        identical=sum(answer.tokens == base.tokens for answer, base in zip(answers, bases, strict=True)),
        first_token_ms=_first_token_ms(answers),
        joules_per_token=_joules_per_token(answers),
    )


def _first_token_ms(answers: Sequence[Answer]) -> float | None:
    known = [answer.first_token_s for answer in answers if answer.first_token_s is not None]
    return statistics.fmean(known) * 1e3 if known else None


def _joules_per_token(answers: Sequence[Answer]) -> float | None:
    measured = [answer.joules for answer in answers if answer.joules is not None]
    if len(measured) < len(answers):
        return None
    return sum(measured) / sum(len(answer.tokens) for answer in answers)

"""Markdown that is only ever appended: any split gives the same screen, and no word is lost."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from starsd_edge.chat.markdown import MarkdownStream

BOLD, ITALIC, CODE, DIM = "\x1b[1m", "\x1b[3m", "\x1b[36m", "\x1b[2m"
pieces_of_markdown = st.lists(
    st.sampled_from(
        [
            "**",
            "*",
            "_",
            "`",
            "```",
            "```py\n",
            "\n",
            "# ",
            "- ",
            "1. ",
            "> ",
            " ",
            "word",
            "a",
            "x*y",
            "你好",
            "🙂",
            "\\",
        ]
    ),
    max_size=25,
).map("".join)


def shown(text: str, size: int = 1000, width: int = 30, **options: bool) -> str:
    """On a terminal of one column more than `width`, which stays free."""
    stream = MarkdownStream(width + 1, **options)
    out = "".join(stream.push(text[i : i + size]) for i in range(0, len(text), size)) + stream.flush()
    if options.get("wrap", True) and "```" not in text:
        assert stream.column == columns(plain(out).split("\n")[-1])
    return out


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def columns(line: str) -> int:
    return sum(2 if letter in "你好世界🙂" else 1 for letter in line)


@given(text=pieces_of_markdown, size=st.integers(1, 7))
@example(text="# ```**`**```", size=1)  # three backticks begin a span that three end, not one
def test_any_split_gives_the_same_screen(text: str, size: int) -> None:
    assert plain(shown(text)) == plain(shown(text, size))


@given(text=pieces_of_markdown, width=st.integers(8, 40))
def test_no_letter_is_lost_and_no_line_is_too_long(text: str, width: int) -> None:
    out = plain(shown(text, width=width))
    letters = re.sub(r"[\s*_`]", "", text)
    assert letters == re.sub(r"[\s*_`]", "", out)
    assert "```" in text or all(columns(line) <= width for line in out.split("\n"))


@given(text=pieces_of_markdown)
def test_without_style_the_text_is_as_it_came(text: str) -> None:
    assert text == shown(text, styled=False, wrap=False)


@pytest.mark.parametrize(
    ("expected", "text"),
    [
        (f"a {BOLD}b\x1b[0m c", "a **b** c"),
        (f"a {ITALIC}b\x1b[0m c", "a *b* c"),
        (f"run {CODE}x * y\x1b[0m", "run `x * y`"),
        ("2 * 3 * 4", "2 * 3 * 4"),
        ("snake_case_name", "snake_case_name"),
        ("__init__", "__init__"),
        ("f(*args, x)", "f(*args, x)"),
        ("**never closed", "**never closed"),
        (f"{DIM}#\x1b[0m \x1b[1;36mTitle\x1b[0m\n", "# Title\n"),
        ("#hashtag", "#hashtag"),
        (f"{BOLD}-\x1b[0m item", "- item"),
        ("-5 degrees", "-5 degrees"),
    ],
)
def test_what_markdown_means(expected: str, text: str) -> None:
    styled, changed = shown(text), True
    while changed:  # styles are set word by word
        joined = re.sub(r"(\x1b\[[\d;]+m)([^\x1b]*)\x1b\[0m( ?)\1", r"\1\2\3", styled)
        changed, styled = joined != styled, joined
    assert expected == styled
    assert plain(expected) == plain(shown(text))


def test_code_blocks_are_shown_letter_by_letter_and_not_read_as_markdown() -> None:
    out = shown("```python\nx = 2 **n  # `no`\n```\nafter **b**")
    assert "x = 2 **n  # `no`\n" in plain(out)
    assert plain(out).endswith("after b")


def test_lines_break_between_words_and_items_hang() -> None:
    assert "- one two\n  three\nfour five\nsix" == plain(
        shown("- one two three\nfour five six", width=10)
    ).replace(" \n", "\n")


def test_a_span_is_not_shown_half() -> None:
    stream = MarkdownStream(40)
    assert "" == plain(stream.push("**bo")) + plain(stream.push("ld*"))
    assert "bold " == plain(stream.push("* "))


def test_escape_sequences_of_a_model_do_not_reach_the_terminal() -> None:
    assert "a[2Jb]0;title" == plain(shown("a\x1b[2Jb\x1b]0;title\x07", styled=False))


def test_no_colour_keeps_bold() -> None:
    assert CODE not in shown("`x` **b**", colour=False)
    assert BOLD in shown("`x` **b**", colour=False)

"""What the demo makes of its measurements."""

from __future__ import annotations

from dataclasses import replace

from starsd_edge.demo.report import Answer, Comparison, as_json, remarks, summarise


def answer(tokens: list[int], decode_s: float, *, accepted: int = 0, verified: int = 0) -> Answer:
    return Answer(
        tokens=tokens,
        decode_s=decode_s,
        rounds=len(tokens) - 1 - accepted,
        accepted=accepted,
        verified_rounds=verified,
        updates=verified,
        update_bytes=1000 * verified,
        downlink_bytes=50 * verified,
    )


def test_both_sides_are_counted_alike() -> None:
    """The first token is the prompt's on both sides: ten tokens in a second are nine a second."""
    comparison = Comparison("p", answer(list(range(10)), 1.0), answer(list(range(10)), 0.5))
    assert comparison.plain.tokens_per_s == 9.0
    assert comparison.starsd.tokens_per_s == 18.0
    assert comparison.ratio == 2.0
    assert comparison.identical


def test_ratio_is_the_median_of_ratios_and_a_difference_is_counted() -> None:
    comparisons = [
        Comparison("a", answer([1, 2, 3], 1.0), answer([1, 2, 3], 1.0)),
        Comparison("b", answer([1, 2, 3], 1.0), answer([1, 2, 3], 0.25, accepted=1, verified=1)),
        Comparison("c", answer([1, 2, 3], 1.0), answer([1, 2, 4], 0.5)),
    ]
    summary = summarise("this machine", comparisons)
    assert summary.ratio == 2.0
    assert summary.prompts == 3
    assert summary.identical == 2
    assert summary.acceptance_length == 2.0
    assert summary.uplink_bytes_per_round == 1000.0


def test_answers_of_one_token_do_not_divide_by_zero() -> None:
    summary = summarise("this machine", [Comparison("a", answer([2], 0.0), answer([2], 0.0))])
    assert summary.ratio == 0.0
    assert summary.identical == 1


def test_json_has_the_keys_that_scripts_read() -> None:
    summary = summarise("p", [Comparison("a", answer([1, 2], 1.0), answer([1, 2], 1.0))])
    assert set(as_json(summary)) == {
        "plain_tokens_per_s",
        "starsd_tokens_per_s",
        "ratio",
        "acceptance_length",
        "prompts",
        "identical",
        "uplink_bytes_per_round",
        "downlink_bytes_per_round",
        "verified_share",
        "overrun_share",
        "profile",
    }


def test_a_comparison_without_trees_says_so_and_why() -> None:
    starsd = replace(answer([1, 2, 3], 1.0), outage="the draft service stopped answering")
    lines = remarks(summarise("p", [Comparison("x", answer([1, 2, 3], 1.0), starsd)]))
    assert lines[0].startswith("p: 0% of StarSD's rounds verified a tree")
    assert lines[1].endswith("the draft service stopped answering")

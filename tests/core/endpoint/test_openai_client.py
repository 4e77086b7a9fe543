"""The endpoint as OpenAI's own Python client sees it, over TCP."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator

import openai
import pytest

from starsd_edge.endpoint.guard import Guard
from starsd_edge.endpoint.openai import MAX_MESSAGES
from tests.core.chat.toys import CountingTarget, toy_speaker
from tests.core.endpoint.serving import MODEL, Served, serving

FOX = "The quick brown fox 🙂 jumps over the lazy dog"
QUESTION = [{"role": "user", "content": "Who?"}]


@pytest.fixture(scope="module")
def fox() -> Iterator[Served]:
    with serving(toy_speaker(script=FOX)) as served:
        yield served


@pytest.fixture(scope="module")
def dreamer() -> Iterator[Served]:
    """Says what its hash makes of the context."""
    with serving(toy_speaker(max_contexts=2)) as served:
        yield served


def test_a_whole_answer(fox: Served) -> None:
    answer = fox.client().chat.completions.create(model=MODEL, messages=QUESTION)  # type: ignore[arg-type]
    assert ("assistant", FOX) == (answer.choices[0].message.role, answer.choices[0].message.content)
    assert "stop" == answer.choices[0].finish_reason
    assert "chat.completion" == answer.object
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None


def test_a_streamed_answer_has_a_role_first_and_a_reason_last(fox: Served) -> None:
    chunks = list(fox.client().chat.completions.create(model=MODEL, messages=QUESTION, stream=True))  # type: ignore[call-overload]
    assert "assistant" == chunks[0].choices[0].delta.role
    assert FOX == "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert [None] * (len(chunks) - 1) + ["stop"] == [chunk.choices[0].finish_reason for chunk in chunks]
    assert 1 == len({chunk.id for chunk in chunks})
    assert len(chunks) > 5
    assert all(chunk.usage is None for chunk in chunks)


def test_usage_comes_last_and_only_when_asked(fox: Served) -> None:
    chunks = list(
        fox.client().chat.completions.create(  # type: ignore[call-overload]
            model=MODEL, messages=QUESTION, stream=True, stream_options={"include_usage": True}
        )
    )
    assert [] == chunks[-1].choices
    assert chunks[-1].usage.completion_tokens > 0
    assert all(chunk.usage is None and chunk.choices for chunk in chunks[:-1])
    metrics = chunks[-1].metrics
    assert 1.0 == metrics["speculative_decoding"]["mean_acceptance_length"]
    assert metrics["tokens_per_second"] > 0


def test_the_stream_on_the_wire_is_what_strict_clients_want(fox: Served) -> None:
    """finish_reason null and not absent; [DONE] last; events separated by an empty line."""
    with fox.client().chat.completions.with_streaming_response.create(
        model=MODEL,
        messages=QUESTION,
        stream=True,  # type: ignore[arg-type]
    ) as response:
        assert "text/event-stream" in response.headers["content-type"]
        body = b"".join(response.iter_bytes())
    events = body.split(b"\n\n")
    assert b"" == events.pop()
    assert b"data: [DONE]" == events.pop()
    assert all(event.startswith(b"data: {") for event in events)
    assert all(b'"finish_reason":null' in event for event in events[:-1])
    assert b'"usage"' not in body


def test_stop_strings_end_the_text_and_do_not_leak(fox: Served) -> None:
    client = fox.client()
    whole = client.chat.completions.create(model=MODEL, messages=QUESTION, stop="ck br")  # type: ignore[arg-type]
    assert ("The qui", "stop") == (whole.choices[0].message.content, whole.choices[0].finish_reason)
    chunks = client.chat.completions.create(model=MODEL, messages=QUESTION, stop=["zzz", "own"], stream=True)  # type: ignore[call-overload]
    assert "The quick br" == "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_cut_answer_says_length(fox: Served, name: str) -> None:
    answer = fox.client().chat.completions.create(model=MODEL, messages=QUESTION, **{name: 2})  # type: ignore[call-overload]
    assert ("length", 2) == (answer.choices[0].finish_reason, answer.usage.completion_tokens)


def test_a_seed_decides_a_sampled_text(dreamer: Served) -> None:
    def ask(seed: int) -> str | None:
        answer = dreamer.client().chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            seed=seed,
            temperature=1.0,
            top_p=0.9,
            max_tokens=12,  # type: ignore[arg-type]
        )
        return answer.choices[0].message.content

    assert ask(1) == ask(1)
    assert ask(1) != ask(2)


def test_log_probabilities_of_every_token(dreamer: Served) -> None:
    answer = dreamer.client().chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        logprobs=True,
        top_logprobs=2,
        temperature=0,
        max_tokens=6,  # type: ignore[arg-type]
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert 6 == len(logprobs.content)
    for entry in logprobs.content:
        assert 2 == len(entry.top_logprobs)
        assert entry.token == entry.top_logprobs[0].token
        assert 0.0 < math.exp(entry.logprob) <= 1.0
        assert bytes(entry.bytes or []).decode("utf-8", "replace") == entry.token


def test_raw_completions(fox: Served) -> None:
    client = fox.client()
    prompt = "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
    whole = client.completions.create(model=MODEL, prompt=prompt, max_tokens=100)
    assert (FOX, "stop") == (whole.choices[0].text, whole.choices[0].finish_reason)
    chunks = list(client.completions.create(model=MODEL, prompt=prompt, max_tokens=100, stream=True))
    assert FOX == "".join(chunk.choices[0].text for chunk in chunks)
    assert "stop" == chunks[-1].choices[0].finish_reason


def test_a_prompt_of_tokens_and_its_log_probabilities(dreamer: Served) -> None:
    answer = dreamer.client().completions.create(model=MODEL, prompt=[1, 300, 301], logprobs=2, max_tokens=3)
    assert 3 == answer.usage.prompt_tokens  # type: ignore[union-attr]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert [0, *map(len, logprobs.tokens)][:2] == (logprobs.text_offset or [])[:2]


def test_content_in_parts_and_a_developer_message(fox: Served) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Wh"}, {"type": "text", "text": "o?"}]},
    ]
    answer = fox.client().chat.completions.create(model=MODEL, messages=messages)  # type: ignore[arg-type]
    assert FOX == answer.choices[0].message.content


def test_models_are_listed_and_found(fox: Served) -> None:
    client = fox.client()
    assert [MODEL] == [model.id for model in client.models.list()]
    assert MODEL == client.models.retrieve(MODEL).id
    with pytest.raises(openai.NotFoundError, match="'other'"):
        client.models.retrieve("other")


@pytest.mark.parametrize(
    ("param", "options"),
    [
        ("n", {"n": 2}),
        ("tools", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        ("response_format", {"response_format": {"type": "json_object"}}),
        ("logit_bias", {"logit_bias": {"5": 10}}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_tokens", {"max_tokens": "many"}),
        ("temperature", {"temperature": -1}),
        ("stop", {"stop": ["a", "b", "c", "d", "e"]}),
        ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
        ("messages", {"messages": []}),
        ("messages", {"messages": QUESTION * (MAX_MESSAGES + 1)}),
        ("messages[0].role", {"messages": [{"role": "robot", "content": "x"}]}),
        ("messages[0].content", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    fox: Served, param: str, options: dict[str, object]
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        fox.client().chat.completions.create(**{"model": MODEL, "messages": QUESTION, **options})  # type: ignore[call-overload]
    assert param == caught.value.param
    assert "invalid_request_error" == caught.value.type


def test_unknown_fields_are_ignored(fox: Served) -> None:
    answer = fox.client().chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        extra_body={"keep_alive": "5m", "options": {"x": 1}},  # type: ignore[arg-type]
    )
    assert FOX == answer.choices[0].message.content


def test_another_model_is_not_found(fox: Served) -> None:
    with pytest.raises(openai.NotFoundError, match="this server has 'toy'"):
        fox.client().chat.completions.create(model="gpt-4", messages=QUESTION)  # type: ignore[arg-type]


def test_a_message_that_is_too_long_is_refused(dreamer: Served) -> None:
    long = [{"role": "user", "content": "fox " * 1000}]
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="shorten it"):
            dreamer.client().chat.completions.create(model=MODEL, messages=long, stream=stream)  # type: ignore[call-overload]


def test_the_key_is_needed_where_there_is_one() -> None:
    with serving(toy_speaker(script=FOX), guard=Guard("sesame")) as served:
        for wrong in ("guess", "sesam", "sesame2"):
            with pytest.raises(openai.AuthenticationError):
                served.client(wrong).models.list()
        assert [MODEL] == [model.id for model in served.client("sesame").models.list()]


def test_a_client_that_leaves_frees_the_model() -> None:
    """The answer it left would take minutes; the next one gets its turn at once."""
    targets: list[CountingTarget] = []
    with serving(toy_speaker(targets, script="fox " * 3000, max_len=20000, round_s=0.02)) as served:
        stream = served.client().chat.completions.create(model=MODEL, messages=QUESTION, stream=True)  # type: ignore[call-overload]
        next(iter(stream))
        stream.close()
        answer = served.client().chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=3)  # type: ignore[arg-type]
        assert 3 == answer.usage.completion_tokens  # type: ignore[union-attr]
        assert targets[0].num_forwards < 1000


def test_beyond_the_queue_clients_are_told_to_come_again() -> None:
    with serving(toy_speaker(script="fox " * 3000, max_len=20000, round_s=0.02), max_waiting=1) as served:
        running = served.client().chat.completions.create(model=MODEL, messages=QUESTION, stream=True)  # type: ignore[call-overload]
        next(iter(running))
        waiting = threading.Thread(
            target=lambda: served.client().chat.completions.create(
                model=MODEL,
                messages=QUESTION,
                max_tokens=1,  # type: ignore[arg-type]
            )
        )
        waiting.start()
        while served.endpoint.worker.num_waiting < 1:
            pass
        with pytest.raises(openai.RateLimitError) as caught:
            served.client().chat.completions.create(model=MODEL, messages=QUESTION)  # type: ignore[arg-type]
        assert int(caught.value.response.headers["retry-after"]) > 0
        running.close()
        waiting.join()


def test_conversations_side_by_side_reuse_their_own_cache(dreamer: Served) -> None:
    client = dreamer.client()
    told: list[list[dict[str, str]]] = [
        [{"role": "user", "content": "first person speaking of foxes"}],
        [{"role": "user", "content": "a second voice, about trees"}],
    ]
    cached = []
    for _ in range(3):
        for messages in told:
            answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8, seed=1)  # type: ignore[arg-type]
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            cached.append(
                (answer.usage.prompt_tokens_details.cached_tokens or 0) / answer.usage.prompt_tokens
            )
            messages += [
                {"role": "assistant", "content": answer.choices[0].message.content or ""},
                {"role": "user", "content": "go on"},
            ]
    assert min(cached[2:]) > 0.5

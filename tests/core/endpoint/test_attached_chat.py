"""A chat on a running server says what a chat with the model in its own process says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from starsd_edge.chat.answer import AnswerEnd, AnswerPiece, FinishReason
from starsd_edge.chat.conversation import Conversation
from starsd_edge.chat.remote import RemoteBackend, find_server
from starsd_edge.chat.settings import ChatSettings, FullWindow
from starsd_edge.chat.status import LinkState
from starsd_edge.decoding.sampling import SamplingParams
from starsd_edge.endpoint.guard import Guard
from starsd_edge.errors import AuthenticationError, UnreachableError, UsageError
from tests.core.chat.toys import toy_speaker
from tests.core.endpoint.serving import Served, serving

SAMPLED = ChatSettings(
    max_tokens=24, sampling=SamplingParams(temperature=1.0, top_k=50, seed=5), stop=("\n",)
)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(toy_speaker()) as server:
        yield server


def ask(conversation: Conversation, text: str) -> tuple[str, AnswerEnd]:
    events = list(conversation.ask(text))
    assert isinstance(events[-1], AnswerEnd)
    return "".join(e.text for e in events if isinstance(e, AnswerPiece)), events[-1]


def test_the_same_texts_and_figures_turn_by_turn(served: Served) -> None:
    near = Conversation(toy_speaker(), SAMPLED)
    far = Conversation(RemoteBackend(served.url), SAMPLED)
    for question in ("Who?", "And then?", "Why?"):
        expected, here = ask(near, question)
        said, there = ask(far, question)
        assert expected == said
        assert here.reason is there.reason
        for name in ("prompt_tokens", "cached_tokens", "completion_tokens", "plain_rounds"):
            assert getattr(here.figures, name) == getattr(there.figures, name)


def test_stopping_keeps_what_was_said_and_frees_the_server() -> None:
    with serving(toy_speaker(script="fox " * 3000, max_len=20000, round_s=0.01)) as served:
        conversation = Conversation(RemoteBackend(served.url))
        for event in conversation.ask("Who?"):
            if isinstance(event, AnswerPiece):
                conversation.backend.cancel()
            if isinstance(event, AnswerEnd):
                assert FinishReason.CANCELLED is event.reason
        assert (conversation.last_answer or "").startswith("fo")
        conversation.settings = ChatSettings(max_tokens=2)
        assert FinishReason.LENGTH is ask(conversation, "And?")[1].reason


def test_a_full_window_is_told(served: Served) -> None:
    conversation = Conversation(RemoteBackend(served.url), SAMPLED)
    dropped = 0
    for _ in range(8):
        dropped = ask(conversation, "fox " * 20)[1].num_dropped
    assert dropped > 0
    conversation.settings = ChatSettings(full_window=FullWindow.REFUSE)
    with pytest.raises(UsageError, match="start afresh"):
        ask(conversation, "more")


def test_the_link_of_the_server_is_the_chat_s(served: Served) -> None:
    backend = RemoteBackend(served.url)
    assert LinkState.NONE is backend.link().state


def test_a_server_is_found_and_other_things_are_not(served: Served) -> None:
    assert "toy" == find_server(served.url)
    assert find_server("http://127.0.0.1:1") is None
    with pytest.raises(UnreachableError, match="starsd serve"):
        RemoteBackend("http://127.0.0.1:1")


def test_a_server_that_ends_is_one_clear_error() -> None:
    with serving(toy_speaker(script="Yes")) as server:
        conversation = Conversation(RemoteBackend(server.url))
    with pytest.raises(UnreachableError, match="stopped answering"):
        ask(conversation, "Who?")
    assert [] == conversation.messages
    assert LinkState.LOST is conversation.backend.link().state


def test_the_key_is_sent_and_asked_for() -> None:
    with serving(toy_speaker(script="Yes"), guard=Guard("sesame")) as server:
        with pytest.raises(AuthenticationError, match="STARSD_API_KEY"):
            RemoteBackend(server.url, "wrong")
        assert "Yes" == ask(Conversation(RemoteBackend(server.url, "sesame")), "Who?")[0]


@pytest.mark.parametrize(
    "url",
    [
        "http://192.168.1.5:8642",
        "ftp://localhost",
        "http://",
        "http://127.0.0.1:99999",
        "127.0.0.1:abc",
        "http://[::1",
    ],
)
def test_addresses_that_are_not_used(url: str) -> None:
    with pytest.raises(UsageError):
        RemoteBackend(url)

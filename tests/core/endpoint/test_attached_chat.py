"""A chat on a running server says what a chat with the model in its own process says."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from starsd_edge.chat.answer import AnswerEnd, AnswerEvent, AnswerPiece, FinishReason
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
    assert LinkState.NO_SERVER is conversation.backend.link().state


def before_the_last_event(answer: bytes) -> int:
    return answer.index(b"data: [DONE]")


def in_the_middle_of_an_event(answer: bytes) -> int:
    return answer.index(b'"content":"s') + 9


def before_anything(answer: bytes) -> int:
    return 0


@pytest.mark.parametrize("cut", [before_the_last_event, in_the_middle_of_an_event, before_anything])
def test_an_answer_that_breaks_off_is_not_one_that_is_over(cut: Callable[[bytes], int]) -> None:
    """As when the server is killed: what came is shown, and nothing says that this was all."""
    with serving(toy_speaker(script="Yes, and so on")) as server, closing(Cutter(server.port, cut)) as cutter:
        conversation = Conversation(RemoteBackend(f"http://127.0.0.1:{cutter.port}"))
        came: list[AnswerEvent] = []
        with pytest.raises(UnreachableError, match=r"stopped answering.*`starsd serve`"):
            came.extend(conversation.ask("Who?"))
    assert not any(isinstance(event, AnswerEnd) for event in came)


class Cutter:
    """Passes bytes to and from a server on `server_port`, and hangs up at `cut` of an answer's bytes."""

    def __init__(self, server_port: int, cut: Callable[[bytes], int]) -> None:
        self._server_port, self._cut = server_port, cut
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                self._pass_on(self._listener.accept()[0])

    def _pass_on(self, client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", self._server_port)) as server:
            request = b""
            while b"\r\n\r\n" not in request:
                request += client.recv(65536)
            head, _, body = request.partition(b"\r\n\r\n")
            length = int((re.search(rb"(?i)content-length: (\d+)", head) or [0, 0])[1])
            while len(body) < length:
                body += client.recv(65536)
            server.sendall(head + b"\r\nConnection: close\r\n\r\n" + body)
            answer = b"".join(iter(lambda: server.recv(65536), b""))
            client.sendall(answer[: self._cut(answer)] if head.startswith(b"POST") else answer)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


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

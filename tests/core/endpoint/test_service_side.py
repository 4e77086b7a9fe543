"""What operators and odd clients see: health, metrics, broken bodies, long prompts, failures half-way."""

from __future__ import annotations

import json
import logging
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from starsd_edge.chat.answer import Figures
from starsd_edge.chat.settings import ChatSettings
from starsd_edge.decoding.tree import DraftTree
from starsd_edge.endpoint.app import Endpoint
from starsd_edge.endpoint.body import MAX_BODY_BYTES
from starsd_edge.endpoint.guard import Guard
from starsd_edge.endpoint.metrics import EndpointMetrics
from starsd_edge.endpoint.server import Tls, check_tls, make_server, open_socket
from starsd_edge.endpoint.worker import Worker
from starsd_edge.errors import ConfigError, ResourceError
from tests.core.chat.toys import CountingTarget, toy_speaker
from tests.core.endpoint.serving import MODEL, Served, httpx, self_signed, serving

FOX = "The quick brown fox jumps over the lazy dog"
ASK = {"model": MODEL, "messages": [{"role": "user", "content": "Who?"}]}


@pytest.fixture(scope="module")
def fox() -> Iterator[Served]:
    with serving(toy_speaker(script=FOX)) as served:
        yield served


def post(served: Served, body: object, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(f"{served.url}/v1/chat/completions", content=content, headers=headers, timeout=60)


def metrics_of(served: Served) -> dict[str, float]:
    text = httpx.get(f"{served.url}/metrics").text
    return {
        sample.name + (sample.labels.get("outcome") or ""): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "le" not in sample.labels
    }


def test_health_tells_the_model_and_the_link(fox: Served) -> None:
    health = httpx.get(f"{fox.url}/health").json()
    assert {"status": "ok", "model": MODEL, "link": "none", "waiting": 0}.items() <= health.items()


def test_metrics_count_requests_and_tokens(fox: Served) -> None:
    before = metrics_of(fox)
    usage = post(fox, ASK).json()["usage"]
    after = metrics_of(fox)
    assert 1 == after["starsd_requests_totalstop"] - before.get("starsd_requests_totalstop", 0)
    for name, value in (("generation", "completion_tokens"), ("prompt", "prompt_tokens")):
        key = f"starsd_{name}_tokens_total"
        assert usage[value] == after[key] - before[key]
    assert 0 == after["starsd_requests_running"]


@pytest.mark.parametrize(
    ("status", "message", "body"),
    [
        (400, "not JSON", b"{"),
        (400, "not JSON", b"\xff\xfe"),
        (400, "Expected `object`", b"[]"),
        (400, "missing required field `messages`", b"{}"),
        (413, "exceeds", b'"' + b"x" * MAX_BODY_BYTES + b'"'),
    ],
)
def test_broken_bodies_get_openai_s_error(fox: Served, status: int, message: str, body: bytes) -> None:
    response = post(fox, body)
    assert status == response.status_code
    error = response.json()["error"]
    assert message in error["message"]
    assert {"message", "type", "param", "code"} == set(error)


def test_unknown_paths_and_methods_get_openai_s_error(fox: Served) -> None:
    assert (
        "there is no GET /v1/embeddings" in httpx.get(f"{fox.url}/v1/embeddings").json()["error"]["message"]
    )
    assert 404 == httpx.get(f"{fox.url}/v1/chat/completions").status_code


def test_pages_of_other_sites_are_kept_out(fox: Served) -> None:
    assert 403 == post(fox, ASK, origin="https://evil.example").status_code
    assert 403 == post(fox, ASK, host="evil.example").status_code


def test_an_allowed_page_may_ask() -> None:
    with serving(toy_speaker(script=FOX), guard=Guard(origins=["https://ui.example"])) as served:
        response = post(served, ASK, origin="https://ui.example")
        assert "https://ui.example" == response.headers["access-control-allow-origin"]
        assert FOX == response.json()["choices"][0]["message"]["content"]


def test_comments_keep_the_line_open_while_a_prompt_waits() -> None:
    release = threading.Event()

    class Waiting(CountingTarget):
        def prefill(self, tokens):  # type: ignore[no-untyped-def]
            release.wait()
            return super().prefill(tokens)

    speaker = toy_speaker(target=Waiting, script=FOX)
    with (
        serving(speaker, keep_alive_s=0.05) as served,
        httpx.stream(
            "POST", f"{served.url}/v1/chat/completions", json={**ASK, "stream": True}, timeout=60
        ) as response,
    ):
        lines = response.iter_lines()
        comments = 0
        for line in lines:
            comments += line.startswith(":")
            if comments == 3:
                release.set()
                break
        text = "".join(
            json.loads(line[6:])["choices"][0]["delta"].get("content", "")
            for line in lines
            if line.startswith("data: {")
        )
        assert FOX == text


class Failing(CountingTarget):
    """Fails in the middle of an answer."""

    def forward(self, tree: DraftTree):  # type: ignore[no-untyped-def]
        if self.num_forwards == 4:
            raise ResourceError("the accelerator is out of memory: use a smaller --context")
        return super().forward(tree)


def test_a_failure_half_way_is_an_error_event_and_the_server_goes_on() -> None:
    with serving(toy_speaker(target=Failing, script=FOX)) as served:
        response = post(served, {**ASK, "stream": True})
        events = [line for line in response.text.split("\n\n") if line]
        assert "out of memory" in json.loads(events[-1].removeprefix("data: "))["error"]["message"]
        assert "[DONE]" not in response.text
        whole = post(served, ASK)
        assert 500 == whole.status_code
        assert "out of memory" in whole.json()["error"]["message"]
        assert 200 == httpx.get(f"{served.url}/health").status_code


def test_off_loopback_it_speaks_tls(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    worker = Worker(toy_speaker(script=FOX), 4)
    endpoint = Endpoint(worker, MODEL, ChatSettings(), Guard("sesame"), created=0)
    server = make_server(endpoint, Tls(certificate, key))
    with open_socket("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        port = listener.getsockname()[1]
        trusting = ssl.create_default_context(cafile=str(certificate))
        while not server.started:
            assert thread.is_alive()
        response = httpx.post(
            f"https://localhost:{port}/v1/chat/completions",
            json=ASK,
            headers={"Authorization": "Bearer sesame"},
            verify=trusting,
        )
        assert FOX == response.json()["choices"][0]["message"]["content"]
        with socket.create_connection(("127.0.0.1", port)) as plain:
            plain.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert not plain.recv(100).startswith(b"HTTP/1.1 200")
        worker.close()
        server.should_exit = True
        thread.join()


def test_every_metric_is_explained_and_positions_mean_what_vllm_s_do() -> None:
    """Three rounds: two of which one draft token was accepted, one of which two were."""
    figures = Figures(completion_tokens=7, plain_rounds=0)
    figures.verified.update({(3, 1): 2, (3, 2): 1})
    metrics = EndpointMetrics()
    metrics.answered(figures, "stop")
    text = metrics.exposition(waiting=0, running=False, link_ready=True).decode()
    families = [f for f in text_string_to_metric_families(text) if not f.name.endswith("_created")]
    page = (Path(__file__).parents[3] / "docs" / "endpoint.md").read_text(encoding="utf-8")
    for family in families:
        name = family.name + "_total" * (family.type == "counter")
        labels = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
        assert f"| `{name}` | {family.type} | {', '.join(labels)} | {family.documentation} |" in page
    assert page.count("| `starsd_") == len(families)
    (positions,) = (family for family in families if family.name.endswith("_per_pos"))
    counted = {s.labels["position"]: s.value for s in positions.samples if s.name.endswith("_total")}
    assert {"0": 3, "1": 1} == counted


HEAD = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n"


def test_a_body_that_says_it_is_too_large_is_not_waited_for(fox: Served) -> None:
    with socket.create_connection(("127.0.0.1", fox.port)) as client:
        client.sendall(HEAD.format(length=MAX_BODY_BYTES + 1).encode())
        assert b" 413 " in client.recv(4096).partition(b"\r\n")[0]


def test_a_body_that_never_comes_does_not_hold_its_connection() -> None:
    with serving(toy_speaker(script=FOX), body_timeout_s=0.05) as served:
        with socket.create_connection(("127.0.0.1", served.port)) as client:
            client.sendall(HEAD.format(length=100).encode() + b"{")
            answer = b"".join(iter(lambda: client.recv(4096), b""))  # up to the end of the connection
        assert b" 408 " in answer.partition(b"\r\n")[0]
        assert b"send it in one go" in answer


def test_clients_that_hang_up_are_no_faults_of_the_server(
    fox: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """Each left a traceback in the log."""
    logging.getLogger("uvicorn.error").addHandler(caplog.handler)
    whole = json.dumps(ASK).encode()
    for head, body in ((len(whole) + 9, whole), (len(whole), whole)):
        with socket.create_connection(("127.0.0.1", fox.port)) as client:
            client.sendall(HEAD.format(length=head).encode() + body)
    assert 200 == post(fox, ASK).status_code  # behind theirs
    logging.getLogger("uvicorn.error").removeHandler(caplog.handler)
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("prompt", [[2**70], [-1], [1, 10**6], [], [[2**70]], [1, "a"], ["a", "b"], [[]]])
def test_numbers_that_are_no_tokens_are_refused_by_name(fox: Served, prompt: object) -> None:
    response = httpx.post(f"{fox.url}/v1/completions", json={"prompt": prompt, "max_tokens": 1}, timeout=60)
    assert (400, "prompt") == (response.status_code, response.json()["error"]["param"])


def test_a_certificate_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    check_tls(Tls(certificate, key))
    (tmp_path / "other").mkdir()
    _, other = self_signed(tmp_path / "other")
    (tmp_path / "text").write_text("no certificate")
    for wrong, tls in (
        ("gone.pem", Tls(tmp_path / "gone.pem", key)),
        ("text", Tls(tmp_path / "text", key)),
        ("other/key.pem", Tls(certificate, other)),
        ("text", Tls(certificate, tmp_path / "text")),
    ):
        with pytest.raises(ConfigError, match=wrong):
            check_tls(tls)

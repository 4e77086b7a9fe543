"""`starsd draft serve` as users start it: real processes, real sockets, a small random head."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from starsd_edge.decoding.roles import Update
from starsd_edge.decoding.tree import DraftTree
from starsd_edge.errors import BundleError, ResourceError, UsageError
from starsd_edge.link.client import RemoteDrafter
from starsd_edge.link.sockets import SyncSocket, make_context
from starsd_edge.protocol.greeting import HelloBody, Identity
from starsd_edge.protocol.messages import (
    Busy,
    BusyReason,
    Draft,
    Error,
    ErrorCode,
    GoAway,
    Hints,
    Message,
    NeedPrefill,
    Pong,
    PrefillAck,
    Welcome,
)
from starsd_server.config import HeadSource, ServiceConfig
from starsd_server.emulate.edge import EmulatedEdge
from starsd_server.engine import Engine
from starsd_server.heads.checkpoint import HeadManifest, save_head
from starsd_server.heads.head import HeadKind
from starsd_server.ipc import private_folder
from starsd_server.scheduling import Limits
from starsd_server.worker import open_heads

from .heads import HIDDEN, VOCAB, random_head, small_config

PATIENCE_MS = 60_000  # far above anything measured: a test that waits this long has failed
ENDS_WITHIN_S = 180  # likewise, for a process to leave: unloading torch takes its time on a starved machine
RETRY_MS = 300
IDENTITY = Identity(
    target="toy",
    target_hash="00",
    vocab_size=VOCAB,
    tokenizer_hash="11",
    hidden_size=HIDDEN,
    feature_size=HIDDEN,
)
HINTS = Hints(max_nodes=16)


@pytest.fixture(scope="module")
def head_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("head")
    manifest = HeadManifest(name="toy-head", head=small_config(HeadKind.EAGLE1), identity=IDENTITY)
    save_head(random_head(HeadKind.EAGLE1), manifest, folder)
    return folder


class Running:
    """A service process and what it said when it was ready."""

    def __init__(self, process: subprocess.Popen[str], status: dict[str, Any]) -> None:
        self.process, self.status = process, status
        self.address: str = status["address"]

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        os.kill(self.status["pids"][name], number)


def start(head: Path, *options: str) -> subprocess.Popen[str]:
    """Leader of a process group of its own."""
    command = [sys.executable, "-m", "starsd_edge", "draft", "serve", "--head", str(head), "--json-status"]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [*command, *options], stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )


@contextmanager
def serving(head: Path, *options: str) -> Iterator[Running]:
    with start(head, "--bind", "tcp://127.0.0.1:0", *options) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, process.stderr.read() if process.stderr else ""
            yield Running(process, json.loads(line))
        finally:
            if process.poll() is None:
                process.terminate()
            process.communicate(timeout=ENDS_WITHIN_S)


@pytest.fixture(scope="module")
def service(head_folder: Path) -> Iterator[Running]:
    with serving(head_folder) as running:
        yield running


@pytest.fixture(scope="module")
def cramped(head_folder: Path) -> Iterator[Running]:
    """One slot, and one session per device."""
    with serving(head_folder, "--max-sessions", "1", "--device-sessions", "1") as running:
        yield running


@pytest.fixture(scope="module")
def fragile(head_folder: Path) -> Iterator[Running]:
    """One whose processes are killed."""
    with serving(head_folder) as running:
        yield running


class Edges:
    """Emulated edges that end with the test."""

    def __init__(self) -> None:
        self.context = make_context()
        self._sockets: list[SyncSocket] = []

    def new(self, running: Running, device: str = "orin", identity: Identity = IDENTITY) -> EmulatedEdge:
        edge = EmulatedEdge(self.context, running.address, identity, device)
        self._sockets.append(edge.socket)
        assert edge.socket.poll(PATIENCE_MS, zmq.POLLOUT)
        return edge

    def greeted(self, running: Running, device: str = "orin") -> EmulatedEdge:
        edge = self.new(running, device)
        edge.hello()
        assert isinstance(answer(edge), Welcome)
        return edge

    def stranger(self, running: Running) -> SyncSocket:
        self._sockets.append(self.context.socket(zmq.DEALER))
        self._sockets[-1].connect(running.address)
        return self._sockets[-1]

    def close(self) -> None:
        for each in self._sockets:
            each.close(linger=0)
        self.context.term()


@pytest.fixture
def edges() -> Iterator[Edges]:
    made = Edges()
    yield made
    made.close()


def answer(edge: EmulatedEdge) -> Message:
    message = edge.receive(PATIENCE_MS)
    assert message is not None, "no answer"
    return message


def rows(seed: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, VOCAB, n).astype(np.int32), rng.standard_normal((n, HIDDEN)).astype(np.float16)


def prompted(edge: EmulatedEdge, seed: int = 0, n: int = 90) -> None:
    edge.open(1)
    assert isinstance(answer(edge), PrefillAck)
    edge.prefill(*rows(seed, n))
    assert isinstance(answer(edge), PrefillAck)


def drafts(edge: EmulatedEdge, rounds: int = 4, seed: int = 0) -> list[tuple[list[int], list[int]]]:
    found = []
    for number in range(rounds):
        edge.update(*rows(1000 * seed + number, 1 + number % 3), HINTS)
        draft = answer(edge)
        assert isinstance(draft, Draft), draft
        found.append((draft.tokens.tolist(), draft.parents.tolist()))
    return found


def test_a_session_is_greeted_prefilled_and_gets_trees(edges: Edges, service: Running) -> None:
    edge = edges.greeted(service)
    prompted(edge)
    round_id = edge.update(*rows(1, 2), HINTS)
    draft = answer(edge)
    assert isinstance(draft, Draft)
    assert (round_id, 93) == (draft.head.round_id, draft.head.base_len)
    assert draft.draft_us > 0
    tokens = np.concatenate([[edge.tokens[-1]], draft.tokens]).astype(np.int32)
    tree = DraftTree(tokens, np.concatenate([[-1], draft.parents]).astype(np.int32), draft.head.base_len)
    assert 2 <= len(tree) <= 16
    edge.close()


def test_two_interleaved_sessions_draft_what_each_drafts_alone(edges: Edges, service: Running) -> None:
    alone = []
    for seed in (1, 2):
        edge = edges.greeted(service)
        prompted(edge, seed)
        alone.append(drafts(edge, seed=seed))
        edge.close()
    pair = [edges.greeted(service, f"device-{seed}") for seed in (1, 2)]
    for seed, edge in zip((1, 2), pair, strict=True):
        prompted(edge, seed)
    together: list[list[tuple[list[int], list[int]]]] = [[], []]
    for number in range(4):
        for seed, edge in zip((1, 2), pair, strict=True):  # both under way at once
            edge.update(*rows(1000 * seed + number, 1 + number % 3), HINTS)
        for place, edge in enumerate(pair):
            draft = answer(edge)
            assert isinstance(draft, Draft)
            together[place].append((draft.tokens.tolist(), draft.parents.tolist()))
    assert alone == together


def test_the_real_client_gets_its_trees(service: Running) -> None:
    """RemoteDrafter: context, a prompt in chunks, rounds, a rollback."""
    hello = HelloBody(
        identity=IDENTITY,
        digest=IDENTITY.digest(),
        device="laptop",
        software="test",
        dtypes=["fp16"],
        max_len=512,
        max_nodes=16,
    )
    drafter = RemoteDrafter(service.address, hello)
    try:
        drafter.start(1)
        start = 0
        for number, n in enumerate([150, 2, 1, 4]):
            drafter.update(Update(start, *rows(number, n)))
            start += n
            tree = drafter.poll(PATIENCE_MS / 1e3)
            assert tree is not None, drafter.state()
            assert start + 1 == tree.base_len
            assert 2 <= len(tree) <= 16
        drafter.rollback(100)
        drafter.update(Update(99, *rows(9, 3)))
        tree = drafter.poll(PATIENCE_MS / 1e3)
        assert tree is not None
        assert 103 == tree.base_len
    finally:
        drafter.close()


def test_the_scheduling_loop_answers_pings(edges: Edges, service: Running) -> None:
    edge = edges.greeted(service)
    edge.ping(77)
    pong = answer(edge)
    assert isinstance(pong, Pong)
    assert 77 == pong.nonce


def test_a_pong_tells_how_long_its_ping_waited_for_the_loop(edges: Edges, service: Running) -> None:
    """`starsd ping` calls that the service's share; it always was nothing."""
    edge = edges.greeted(service)
    service.kill("worker", signal.SIGSTOP)
    try:
        edge.ping(78)
        assert edge.receive(RETRY_MS) is None
    finally:
        service.kill("worker", signal.SIGCONT)
    pong = answer(edge)
    assert isinstance(pong, Pong)
    assert (78, True) == (pong.nonce, pong.queue_us > 1000)


def test_another_target_is_refused_with_the_field_that_differs(edges: Edges, service: Running) -> None:
    other = Identity(
        target="toy",
        target_hash="ff",
        vocab_size=VOCAB,
        tokenizer_hash="11",
        hidden_size=HIDDEN,
        feature_size=HIDDEN,
    )
    edge = edges.new(service, identity=other)
    edge.hello()
    error = answer(edge)
    assert isinstance(error, Error)
    assert ErrorCode.INCOMPATIBLE is error.code
    assert "target_hash" in error.text


def test_stray_bytes_get_an_error_and_hurt_nobody(edges: Edges, service: Running) -> None:
    edge = edges.greeted(service)
    prompted(edge)
    stranger = edges.stranger(service)
    stranger.send_multipart([b"GET / HTTP/1.1", b"\0" * 100])
    assert stranger.poll(PATIENCE_MS)
    with socket.create_connection(service.address.removeprefix("tcp://").split(":")) as raw:
        raw.sendall(b"\xff" * 4096)
    assert drafts(edge)


def test_a_device_with_too_many_sessions_is_told_so(edges: Edges, cramped: Running) -> None:
    edges.greeted(cramped, "hoarder")
    second = edges.new(cramped, "hoarder")
    second.hello()
    busy = answer(second)
    assert isinstance(busy, Busy)
    assert BusyReason.SESSIONS is busy.reason
    assert busy.retry_after_ms > 0


def test_with_one_slot_the_older_session_is_asked_to_prefill_again(edges: Edges, cramped: Running) -> None:
    """Eviction costs time alone: after the prefill the drafts are those of a session never evicted."""
    first, second = (edges.greeted(cramped, name) for name in ("a", "b"))
    prompted(first)
    prompted(second)
    first.update(*rows(5, 2), HINTS)
    need = answer(first)
    assert isinstance(need, NeedPrefill)
    assert 0 == need.head.base_len
    prompted(first)
    after = drafts(first)
    other = edges.greeted(cramped, "c")
    prompted(other)
    assert drafts(other) == after


def test_a_killed_gateway_is_back_and_loses_no_session(edges: Edges, fragile: Running) -> None:
    edge = edges.greeted(fragile)
    prompted(edge)
    drafts(edge, rounds=1)
    fragile.kill("gateway")
    again = edges.new(fragile)
    again.session = edge.session
    again.hello()
    welcome = answer(again)
    assert isinstance(welcome, Welcome)
    assert len(edge.tokens) == welcome.head.base_len


def test_a_killed_worker_is_back_and_asks_for_a_new_start(edges: Edges, fragile: Running) -> None:
    edge = edges.greeted(fragile)
    prompted(edge)
    fragile.kill("worker")
    message: Message | None = None
    for _ in range(PATIENCE_MS // RETRY_MS):
        edge.update(*rows(3, 1), HINTS)
        message = edge.receive(RETRY_MS)
        if isinstance(message, NeedPrefill):
            break
        if isinstance(message, Busy):
            edge.socket.poll(message.retry_after_ms)
    assert isinstance(message, NeedPrefill)
    assert 0 == message.head.base_len


def test_sigterm_says_goodbye_and_ends_well(edges: Edges, head_folder: Path) -> None:
    with serving(head_folder) as running:
        edge = edges.greeted(running)
        running.process.terminate()
        assert isinstance(answer(edge), GoAway)
        assert 0 == running.process.wait(timeout=ENDS_WITHIN_S)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_all_of_its_processes_drains_it_once(
    number: int, edges: Edges, head_folder: Path
) -> None:
    """What systemd and a terminal's Ctrl-C do. The gateway left at once, and another one was started."""
    with serving(head_folder) as running:
        edge = edges.greeted(running)
        os.killpg(running.process.pid, number)
        assert isinstance(answer(edge), GoAway)
        assert 0 == running.process.wait(timeout=ENDS_WITHIN_S)
        assert running.process.stderr is not None
        said = running.process.stderr.read()
    assert "draining" in said
    assert "again" not in said
    assert "Traceback" not in said


def test_a_service_started_by_a_program_ends_with_it(edges: Edges, head_folder: Path) -> None:
    """The end of its standard input is what a killed parent leaves."""
    with serving(head_folder, "--until-eof") as running:
        edge = edges.greeted(running)
        assert running.process.stdin is not None
        running.process.stdin.close()
        running.process.stdin = None  # or communicate() would use it
        assert isinstance(answer(edge), GoAway)
        assert 0 == running.process.wait(timeout=ENDS_WITHIN_S)


@pytest.mark.parametrize(
    ("number", "kill"), [(signal.SIGTERM, os.kill), (signal.SIGHUP, os.kill), (signal.SIGTERM, os.killpg)]
)
def test_a_service_told_to_leave_while_it_starts_leaves_nothing(
    number: int,
    kill: Callable[[int, int], None],
    head_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = tmp_path_factory.mktemp("run")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    with start(head_folder, "--bind", "tcp://127.0.0.1:0") as process:
        deadline_s = time.monotonic() + ENDS_WITHIN_S
        while not list(runtime.iterdir()):
            assert process.poll() is None
            assert time.monotonic() < deadline_s
        kill(process.pid, number)
        assert 0 == process.wait(timeout=ENDS_WITHIN_S)
    assert list(runtime.iterdir()) == []


def test_what_a_killed_service_left_goes_with_the_next_one(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = tmp_path_factory.mktemp("run")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    gone = subprocess.Popen(["true"])
    gone.wait()
    left, others = runtime / f"starsd-{gone.pid}-abc", runtime / f"starsd-{os.getpid()}-abc"
    left.mkdir()
    others.mkdir()
    made = private_folder()
    assert sorted(runtime.iterdir()) == sorted([others, made])
    assert made.stat().st_mode & 0o777 == 0o700


def failed(head: Path, *options: str) -> tuple[int, str]:
    with start(head, *options) as process:
        _, errors = process.communicate(timeout=ENDS_WITHIN_S)
        return process.returncode, [line for line in errors.splitlines() if line.startswith("starsd:")][-1]


def test_a_port_in_use_is_one_clear_line(head_folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        code, line = failed(head_folder, "--bind", address)
    assert 5 == code
    assert f"{address} is in use" in line


def test_a_missing_head_is_one_clear_line(tmp_path: Path) -> None:
    code, line = failed(tmp_path / "nowhere", "--bind", "tcp://127.0.0.1:0")
    assert 4 == code
    assert "nowhere: not a draft head" in line


def test_a_damaged_head_is_named(head_folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "target.safetensors"):
        (tmp_path / name).write_bytes((head_folder / name).read_bytes())
    (tmp_path / "head.safetensors").write_bytes((head_folder / "head.safetensors").read_bytes()[:1000])
    config = ServiceConfig(heads=(HeadSource(str(tmp_path)),), bind="", folder="")
    with pytest.raises(BundleError, match=r"head\.safetensors: cannot be read"):
        open_heads(config)


@pytest.mark.parametrize(("kv_mib", "fits"), [(16, True), (15, False)])
def test_the_kv_budget_is_kept_to_the_byte_or_refused_with_what_fits(
    head_folder: Path, kv_mib: int, fits: bool
) -> None:
    """A row of the toy head takes 256 bytes: 32 sessions of 2,048 are 16 MiB."""
    config = ServiceConfig(
        heads=(HeadSource(str(head_folder)),),
        bind="",
        folder="",
        limits=Limits(max_sessions=32),
        kv_mib=kv_mib,
    )
    if fits:
        _, engines = open_heads(config)
        (engine,) = engines.values()
        assert isinstance(engine, Engine)
        assert 16 * 2**20 == engine.kv.num_bytes
        return
    with pytest.raises(
        ResourceError, match=r"take 16 MiB of KV for 1 head, more than --kv-mib 15, .* for 30"
    ):
        open_heads(config)


def test_rows_of_two_bytes_an_element_are_counted_as_such(head_folder: Path) -> None:
    """On a CPU, too, where --precision says so: it was refused with half of the memory to spare."""
    head = (HeadSource(str(head_folder)),)
    _, engines = open_heads(
        ServiceConfig(
            heads=head, bind="", folder="", limits=Limits(max_sessions=32), kv_mib=8, precision="float16"
        )
    )
    assert [8 * 2**20] == [engine.kv.num_bytes for engine in engines.values() if isinstance(engine, Engine)]


def test_more_sessions_than_fit_into_memory_are_refused_in_one_line(head_folder: Path) -> None:
    code, line = failed(head_folder, "--max-sessions", str(1 << 40))
    assert ResourceError.exit_code == code
    assert (
        f"--max-sessions {1 << 40} sessions of --max-len 2048 tokens do not fit into the memory of cpu"
        in line
    )


def test_a_gpu_that_is_not_here_is_told_in_one_line(head_folder: Path) -> None:
    """It was told by a traceback."""
    for device in ("cuda:64", "gpu", "mps"):
        code, line = failed(head_folder, "--device", device)
        assert line.startswith(f"starsd: --device {device}: ")
        assert "cpu" in line
        assert code in (ResourceError.exit_code, UsageError.exit_code)


def test_two_heads_of_one_name_are_refused_before_they_load(head_folder: Path, tmp_path: Path) -> None:
    other = shutil.copytree(head_folder, tmp_path / "other")
    for weights in other.glob("*.safetensors"):
        weights.write_bytes(b"")
    sources = (HeadSource(str(other)), HeadSource(str(head_folder)))
    with pytest.raises(UsageError, match="two heads are called toy-head"):
        open_heads(ServiceConfig(heads=sources, bind="", folder=""))


def test_off_this_machine_nothing_is_served_in_the_clear(
    head_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STARSD_KEYS", str(tmp_path))
    code, line = failed(head_folder, "--bind", "tcp://0.0.0.0:0")
    assert 3 == code
    assert f"{tmp_path}/service.key: no key is there" in line

"""The transfer benchmark compares what it says it compares; its figures are for people, not for tests."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from starsd_deploy.bench.delay_proxy import DelayProxy
from starsd_deploy.bench.transfer import command
from tests.deploy.loopback import LoopbackDevice


@pytest.mark.slow
def test_both_methods_are_measured_at_every_round_trip(board: LoopbackDevice, tmp_path: Path) -> None:
    """`board` is there for its check that an sshd is installed."""
    out = tmp_path / "rows.json"
    words = ["--size-mb", "1", "--rtt-ms", "0", "--rtt-ms", "4", "--repeat", "1", "--json", str(out)]
    done = CliRunner().invoke(command, words, catch_exceptions=False)
    assert done.exit_code == 0
    record = json.loads(out.read_text())
    assert [(row["rtt_ms"], row["method"]) for row in record["rows"]] == [
        (rtt, method)
        for rtt in (0, 4)
        for method in ("OpenSSH sftp put", "starsd, 1 channel", "starsd, 6 channels")
    ]
    assert set(record["ratio_to_sftp"]) == {"0", "4"}


@pytest.mark.parametrize("delay_s", [0.0, 0.05])
def test_proxy_keeps_bytes_in_order_and_never_early(delay_s: float) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        DelayProxy(server.getsockname()[1], delay_s) as proxy,
    ):
        near = socket.create_connection(("127.0.0.1", proxy.port))
        far, _ = server.accept()
        begun_s = time.monotonic()
        data = bytes(range(256)) * 4000
        threading.Thread(target=lambda: (near.sendall(data), near.shutdown(socket.SHUT_WR))).start()
        pieces = []
        while piece := far.recv(65536):
            pieces.append(piece)
        assert time.monotonic() - begun_s >= delay_s
        assert b"".join(pieces) == data
        near.close()
        far.close()


HOLD_A_PROXY = """
import sys, threading
from starsd_deploy.bench.delay_proxy import DelayProxy
try:
    with DelayProxy(1, 0.0):
        print("up", flush=True)
        while True:  # an interrupt just before a wait is noticed when that ends
            threading.Event().wait(0.1)
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_ctrl_c_in_the_terminal_ends_measuring_without_a_word_of_the_proxy() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD_A_PROXY],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate() == ("", "")
    assert process.returncode == 130

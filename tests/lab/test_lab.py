"""A fleet of three from bare to chatting, through power cuts, back and forth: real systemd, sshd, sudo, TCP.

An aarch64 board (emulated, dressed as a Jetson Orin Nano), a laptop as target behind a bad radio link, a
laptop as draft service. Service and laptop have the model and head that come with the program; the board
has a tiny random model, as emulated arithmetic is slow.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from starsd_jetson.embedded import bundle_path
from tests.cli.tiny_bundle import make_bundle
from tests.lab.devices import Lab, LabDevice

pytestmark = pytest.mark.lab

DESK = LabDevice("desk", "10.77.2.2", "10.77.2.1", ("--arch", "amd64"))
LAP = LabDevice("lap1", "10.77.3.2", "10.77.3.1", ("--arch", "amd64", "--link", "--delay-ms 2"))
BAD_RADIO = "delay_ms=4 jitter_ms=2 loss=0.01 rate_mbit=60"
BOARD = LabDevice("jet1", "10.77.1.2", "10.77.1.1", ("--arch", "arm64", "--board", "orin-nano-jp62"))

MOST_ANSWERS = 60
LINKED = ("connected", "ready", "unused")  # /health: the service answers, whatever is made of its drafts
HEALTH = """
import urllib.request as r
print(r.urlopen("http://127.0.0.1:8642/health", timeout=60).read().decode())
"""
PING = "~/.local/share/starsd/bin/starsd ping tcp://10.77.2.2:7731 --no-upload --count 3"

FLEET = """\
[defaults]
user = "edge"
identity_file = "{identity}"
service = ["desk"]
keep_releases = 2
drain_s = 20
start_timeout_s = 900

[devices.desk]
address = "10.77.2.2"
roles = ["draft"]
bundle = "{embedded}"

[devices.lap1]
address = "10.77.3.2"
roles = ["target"]
bundle = "{embedded}"
arguments = ["--threads", "1", "--max-waiting", "{waiting}"]

[devices.jet1]
address = "10.77.1.2"
roles = ["target"]
bundle = "tiny"
tags = ["board"]
"""
ASK = """
import json, urllib.request as r
messages = [{{"role": "user", "content": "Tell me about stars."}}]
body = {{"messages": messages, "temperature": 0, "max_tokens": {max_tokens}}}
request = r.Request("http://127.0.0.1:8642/v1/chat/completions", json.dumps(body).encode(),
                    {{"content-type": "application/json"}})
print(r.urlopen(request, timeout={timeout_s}).read().decode())
"""


def write_fleet(lab: Lab, waiting: int) -> None:
    """The inventory; another `waiting` is another release, with nothing to send."""
    embedded = bundle_path("int8")
    text = FLEET.format(identity=lab.identity, embedded=embedded, waiting=waiting)
    (lab.folder / "fleet.toml").write_text(text)


def ask(lab: Lab, name: str, max_tokens: int = 60) -> dict[str, Any]:
    """One chat completion of a device's own endpoint."""
    script = ASK.format(timeout_s=600, max_tokens=max_tokens)
    answer = lab.shell(name, f"python3 - <<'EOF'{script}EOF\n", timeout_s=700)
    decoded: dict[str, Any] = json.loads(answer)
    return decoded


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def ask_until_drafted(lab: Lab, name: str) -> dict[str, Any]:
    """The answer in which verified trees became text.

    A starved machine drafts late, and then plain steps are the faster ones: it takes more than one answer.
    """
    for _ in range(MOST_ANSWERS):
        answer = ask(lab, name)
        if accepted(answer):
            return answer
    raise AssertionError(
        f"no tree was of use in {MOST_ANSWERS} answers: {answer['metrics']}, {health(lab, name)}"
    )


def await_link(lab: Lab, name: str) -> None:
    """Until a device's endpoint has its draft service."""
    for _ in range(MOST_ANSWERS):
        if health(lab, name)["link"] in LINKED:
            return
        lab.shell(name, "sleep 2")
    raise AssertionError(f"no draft service: {health(lab, name)}")


def health(lab: Lab, name: str) -> dict[str, Any]:
    """What a device's endpoint says of itself."""
    decoded: dict[str, Any] = json.loads(lab.shell(name, f"python3 - <<'EOF'{HEALTH}EOF\n"))
    return decoded


def accepted(answer: dict[str, Any]) -> int:
    """Tokens of verified trees that became text."""
    return int(answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"])


def status(lab: Lab, name: str) -> dict[str, Any]:
    done = lab.deploy("status", "--json", "--limit", name)
    (record,) = json.loads(done.stdout)
    assert isinstance(record, dict)
    return record


def test_fleet_from_bare_to_chat_through_power_cuts_and_back(lab: Lab) -> None:
    make_bundle(lab.folder)
    write_fleet(lab, 16)
    for device in (DESK, LAP):
        lab.say(f"booting {device.name}")
        lab.up(device)

    lab.say("deploying the draft service")
    assert lab.apply("--limit", "desk")["desk"]["ending"] == "changed"

    lab.say("power cut in the middle of lap1's upload")
    lab.apply_and_unplug("lap1", "+ upload", when_part_bytes=20_000_000)
    there = sum(path.stat().st_size for path in (lab.disk("lap1") / "blobs").glob("*"))
    lab.up(LAP)
    outcome = lab.apply("--limit", "lap1")["lap1"]
    assert outcome["ending"] == "changed"
    lab.say(f"lap1 went on: {outcome['sent_bytes']} bytes more, {there} were whole before")

    lab.say("chatting on lap1 over a bad link")
    lab.impair("lap1", BAD_RADIO)
    first = ask_until_drafted(lab, "lap1")
    assert "0 of 3 lost" in lab.shell("lap1", PING)

    lab.say("again: nothing to do, nothing sent")
    again = lab.apply("--limit", "lap1,desk")
    assert [(r["ending"], r["sent_bytes"]) for r in again.values()] == [("unchanged", 0)] * 2

    lab.say("power cut in the middle of lap1's switch")
    before = status(lab, "lap1")["current"]
    write_fleet(lab, 17)
    lab.apply_and_unplug("lap1", "~ current")
    lab.up(LAP)
    assert text_of(ask_when_up(lab, "lap1")) == text_of(first)
    outcome = lab.apply("--limit", "lap1")["lap1"]
    assert outcome["sent_bytes"] == 0
    after = status(lab, "lap1")
    assert after["current"] == after["running"] != before

    lab.say("rolling lap1 back, offline")
    rolled = lab.deploy("rollback", "--limit", "lap1")
    assert rolled.returncode == 0, rolled.stderr
    assert status(lab, "lap1")["running"] == before
    assert text_of(ask(lab, "lap1")) == text_of(first)
    assert lab.apply("--limit", "lap1")["lap1"]["sent_bytes"] == 0
    assert lab.apply("--limit", "lap1")["lap1"]["ending"] == "unchanged"

    lab.say("rotating lap1's key")
    old_key = keys(lab)["lap1"]
    rotated = lab.deploy("keys", "rotate", "lap1")
    assert rotated.returncode == 0, rotated.stderr
    assert keys(lab)["lap1"] != old_key
    await_link(lab, "lap1")
    assert text_of(ask(lab, "lap1")) == text_of(first)
    assert "0 of 3 lost" in lab.shell("lap1", PING)

    lab.say("a revoked device decodes plainly, and says the same")
    assert lab.deploy("keys", "revoke", "lap1").returncode == 0
    assert text_of(ask(lab, "lap1")) == text_of(first)
    lab.apply("--limit", "lap1")


def test_emulated_board_is_recognised_deployed_and_left_alone(lab: Lab) -> None:
    """After the other test: the draft service is there. Emulated programs are up to fifty times slower."""
    lab.wait_built("arm64")
    lab.say("booting jet1")
    lab.up(BOARD)
    doctor = lab.deploy("doctor", "--limit", "jet1")
    assert "Orin Nano" in doctor.stdout, doctor.stdout
    assert "L4T 36.4.4, JetPack 6.1/6.2" in doctor.stdout
    assert doctor.returncode == 0, doctor.stdout + doctor.stderr
    lab.say("deploying the aarch64 board")
    assert lab.apply("--tags", "board")["jet1"]["ending"] == "changed"
    assert status(lab, "jet1")["active"]
    assert text_of(ask(lab, "jet1", max_tokens=8))
    assert lab.apply("--tags", "board")["jet1"]["ending"] == "unchanged"
    lab.say("done")


def ask_when_up(lab: Lab, name: str) -> dict[str, Any]:
    """After a boot systemd needs a moment for the service; the device itself waits for its port."""
    script = """
import socket, time
for _ in range(600):
    try:
        socket.create_connection(("127.0.0.1", 8642), 1).close()
        break
    except OSError:
        time.sleep(0.5)
"""
    lab.shell(name, f"python3 - <<'EOF'{script}EOF\n", timeout_s=600)
    return ask(lab, name)


def keys(lab: Lab) -> dict[str, str]:
    done = lab.deploy("keys", "list", "--json", "--limit", "lap1,desk")
    return {record["device"]: record["public_key"] for record in json.loads(done.stdout)}

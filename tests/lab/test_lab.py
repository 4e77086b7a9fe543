"""A fleet of three from bare to chatting, through power cuts, back and forth: real systemd, sshd, sudo, TCP.

An aarch64 board (emulated, dressed as a Jetson Orin Nano), a laptop as target behind a bad radio link, a
laptop as draft service. The model is tiny and random: what is tried is everything around it.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cli.tiny_bundle import make_bundle
from tests.lab.devices import Lab, LabDevice

pytestmark = pytest.mark.lab

DESK = LabDevice("desk", "10.77.2.2", "10.77.2.1", ("--arch", "amd64"))
LAP = LabDevice("lap1", "10.77.3.2", "10.77.3.1", ("--arch", "amd64", "--link", "--delay-ms 2"))
BAD_RADIO = "delay_ms=10 jitter_ms=3 loss=0.01 rate_mbit=60"
BOARD = LabDevice("jet1", "10.77.1.2", "10.77.1.1", ("--arch", "arm64", "--board", "orin-nano-jp62"))

# With a target this small plain steps are faster than any link, so the policy may well draft nothing: that
# the device gets through to the service with its key is asked of `ping`.
PING = "~/.local/share/starsd/bin/starsd ping tcp://10.77.2.2:7731 --no-upload --count 3"

FLEET = """\
[defaults]
user = "edge"
identity_file = "{identity}"
bundle = "tiny"
service = ["desk"]
keep_releases = 2
drain_s = 20
start_timeout_s = 900

[devices.desk]
address = "10.77.2.2"
roles = ["draft"]
head = "head"

[devices.lap1]
address = "10.77.3.2"
roles = ["target"]
arguments = ["--max-waiting", "{waiting}"]

[devices.jet1]
address = "10.77.1.2"
roles = ["target"]
tags = ["board"]
"""
ASK = """
import json, urllib.request as r
messages = [{{"role": "user", "content": "Tell me about stars."}}]
body = {{"messages": messages, "temperature": 0, "max_tokens": 40}}
request = r.Request("http://127.0.0.1:8642/v1/chat/completions", json.dumps(body).encode(),
                    {{"content-type": "application/json"}})
print(r.urlopen(request, timeout={timeout_s}).read().decode())
"""


def write_fleet(lab: Lab, waiting: int) -> None:
    """The inventory; another `waiting` is another release, with nothing to send."""
    (lab.folder / "fleet.toml").write_text(FLEET.format(identity=lab.identity, waiting=waiting))


def ask(lab: Lab, name: str) -> dict[str, Any]:
    """One chat completion of a device's own endpoint."""
    answer = lab.shell(name, f"python3 - <<'EOF'{ASK.format(timeout_s=600)}EOF\n", timeout_s=700)
    decoded: dict[str, Any] = json.loads(answer)
    return decoded


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def status(lab: Lab, name: str) -> dict[str, Any]:
    done = lab.deploy("status", "--json", "--limit", name)
    (record,) = json.loads(done.stdout)
    assert isinstance(record, dict)
    return record


def test_fleet_from_bare_to_chat_through_power_cuts_and_back(lab: Lab) -> None:
    from tests.lab.random_head import write_random_head

    bundle = make_bundle(lab.folder)
    write_random_head(bundle, lab.folder / "head")
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
    first = ask(lab, "lap1")
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
    fresh = ask(lab, "lap1")
    assert text_of(fresh) == text_of(first)
    assert "0 of 3 lost" in lab.shell("lap1", PING)

    lab.say("a revoked device decodes plainly, and says the same")
    assert lab.deploy("keys", "revoke", "lap1").returncode == 0
    assert text_of(ask(lab, "lap1")) == text_of(first)
    lab.apply("--limit", "lap1")


def test_emulated_board_is_recognised_deployed_and_left_alone(lab: Lab) -> None:
    """After the other test: the draft service is there. Emulated programs are up to fifty times slower."""
    lab.say("booting jet1")
    lab.up(BOARD)
    doctor = lab.deploy("doctor", "--limit", "jet1")
    assert "Orin Nano" in doctor.stdout, doctor.stdout
    assert "L4T 36.4.4, JetPack 6.1/6.2" in doctor.stdout
    assert doctor.returncode == 0, doctor.stdout + doctor.stderr
    lab.say("deploying the aarch64 board")
    assert lab.apply("--tags", "board")["jet1"]["ending"] == "changed"
    assert status(lab, "jet1")["active"]
    assert text_of(ask(lab, "jet1"))
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

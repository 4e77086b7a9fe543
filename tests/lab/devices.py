"""Driving the lab from a test: devices up, unplugged and impaired; `starsd deploy` as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Lab", "LabDevice", "LabNotRunError"]

PROGRAM = Path(__file__).with_name("device")
BUDGET_S = 1740.0  # of the 30 minutes; the rest is for taking the lab down
SHORT_S = 300.0
LONG_S = 1500.0
PASSWORD = "edge"  # of the lab's user, for sudo


class LabNotRunError(Exception):
    """The lab cannot be built on this machine, or not in its time."""


@dataclass(frozen=True)
class LabDevice:
    """One device of the lab."""

    name: str
    address: str
    host: str
    options: tuple[str, ...]


class Lab:
    """Devices by name, an inventory, and the commands of a user."""

    def __init__(self, folder: Path, lab_folder: Path) -> None:
        self.folder = folder
        self.lab_folder = lab_folder
        self.devices: dict[str, LabDevice] = {}
        self._building: dict[str, subprocess.Popen[bytes]] = {}
        self.begun_s = time.monotonic()
        (folder / "password").write_text(PASSWORD + "\n")
        (folder / "ssh_config").write_text(
            f"Host *\n  UserKnownHostsFile {folder}/known_hosts\n  ConnectTimeout 60\n"
        )

    def say(self, what: str) -> None:
        """A line with the time since the start: the lab is slow, people want to see it move."""
        line = f"lab {time.monotonic() - self.begun_s:6.0f} s  {what}\n"
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, line.encode())

    def build(self, arch: str) -> None:
        """The root file system of an architecture.

        Raises:
            LabNotRunError: it cannot be built here.
        """
        self.build_meanwhile(arch)
        self.wait_built(arch)

    def build_meanwhile(self, arch: str) -> None:
        """Begin to build; `wait_built` before the first device of the architecture."""
        self.say(f"building {arch}")
        environment = os.environ | {"STARSD_LAB": str(self.lab_folder)}
        command = [str(PROGRAM), "build", arch]
        with (self.folder / f"build-{arch}.log").open("wb") as log:
            self._building[arch] = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def wait_built(self, arch: str) -> None:
        """Wait for a root file system.

        Raises:
            LabNotRunError: it cannot be built here.
        """
        process = self._building.pop(arch)
        try:
            status = process.wait(self.left_s(LONG_S))
        except subprocess.TimeoutExpired:
            process.terminate()
            raise LabNotRunError(f"{arch} was not built in time") from None
        self.say(f"{arch} is built")
        if status:
            said = (self.folder / f"build-{arch}.log").read_text(errors="replace").strip()
            raise LabNotRunError(f"{arch} cannot be built: {said[-500:]}")

    def left_s(self, most_s: float) -> float:
        """How long a command may take.

        Raises:
            LabNotRunError: the lab's time is over.
        """
        left_s = BUDGET_S - (time.monotonic() - self.begun_s)
        if left_s <= 0:
            raise LabNotRunError("the lab's 30 minutes are over: this machine is too slow or too busy for it")
        return min(most_s, left_s)

    def up(self, device: LabDevice) -> None:
        """Boot a device: a new one, or one that lost its power."""
        self.devices[device.name] = device
        words = ("--addr", device.address, "--host", device.host, *device.options)
        done = self._device("up", device.name, *words)
        if done.returncode:
            raise LabNotRunError(f"{device.name} does not boot: {done.stderr.strip()}")

    def impair(self, name: str, settings: str) -> None:
        """Change a device's link, as `key=value` words of link.py; it is as before after the next boot."""
        Path("/run/starsd-lab", f"{name}.link").write_text(settings + "\n")

    def unplug(self, name: str) -> None:
        """A power cut: nothing on the device gets to say goodbye."""
        self._device("unplug", name)

    def close(self) -> None:
        """All devices and their disks are gone."""
        for process in self._building.values():
            process.terminate()
        for name in self.devices:
            self._device("rm", name)

    def shell(self, name: str, script: str, timeout_s: float = SHORT_S) -> str:
        """Run a shell script on a device, by OpenSSH's own client."""
        options = (
            "BatchMode=yes",
            "StrictHostKeyChecking=no",
            "UserKnownHostsFile=/dev/null",
            "LogLevel=ERROR",
        )
        words = [word for option in options for word in ("-o", option)]
        command = ["ssh", *words, "-i", str(self.identity), f"edge@{self.devices[name].address}", "sh -s"]
        done = self._run(command, timeout_s, script)
        assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr}"
        return done.stdout

    @property
    def identity(self) -> Path:
        """The key that devices let in."""
        return self.lab_folder / "id_ed25519"

    def disk(self, name: str) -> Path:
        """What a device has written, seen from this machine; it stays when the power goes."""
        return self.lab_folder / "devices" / name / "upper/home/edge/.local/share/starsd"

    def deploy(self, *words: str, timeout_s: float = LONG_S) -> subprocess.CompletedProcess[str]:
        """`starsd deploy ...`."""
        return self._run(self.command(*words), timeout_s)

    def command(self, *words: str) -> list[str]:
        """The argument list of `starsd deploy WORDS`, without anything to ask."""
        options = [
            "--fleet",
            str(self.folder / "fleet.toml"),
            "--ssh-config",
            str(self.folder / "ssh_config"),
        ]
        if words[0] in {"apply", "rollback", "logs"} or words[:2] == ("keys", "rotate"):
            options += ["--sudo-password-file", str(self.folder / "password")]
        return [sys.executable, "-m", "starsd_edge", "deploy", *words, *options]

    def apply(self, *words: str) -> dict[str, Any]:
        """`starsd deploy apply -y --json`, which has to succeed: outcomes by device."""
        done = self.deploy("apply", "-y", "--json", *words)
        assert done.returncode == 0, done.stdout + done.stderr
        return {record["device"]: record for record in json.loads(done.stdout)}

    def apply_and_unplug(self, name: str, line: str, *, when_part_bytes: int = 0) -> str:
        """Apply to one device; cut its power once a line was printed (and so much of an upload is there)."""
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(
            self.command("apply", "-y", "--limit", name),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        assert process.stdout is not None
        printed, has_cut = [], False
        for text in process.stdout:
            printed.append(text)
            if line in text and text.startswith(f"{name}: "):
                while when_part_bytes and self._part_bytes(name) < when_part_bytes and process.poll() is None:
                    threading.Event().wait(0.05)
                has_cut = process.poll() is None
                self.unplug(name)
                break
        printed.append(process.communicate(timeout=self.left_s(SHORT_S))[0])
        output = "".join(printed)
        assert process.returncode != 0, output
        if not has_cut:
            pytest.fail(f"the deployment ended before {line!r} could be cut: {output}")
        return output

    def _part_bytes(self, name: str) -> int:
        """Bytes on the disk, not of the file's final size: parts are made in full length."""
        return sum(path.stat().st_blocks * 512 for path in (self.disk(name) / "parts").glob("*.part"))

    def _run(self, command: list[str], timeout_s: float, stdin: str = "") -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                command,
                input=stdin,
                capture_output=True,
                text=True,
                timeout=self.left_s(timeout_s),
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            self.left_s(timeout_s)  # where the lab's time is over, that is the reason
            raise AssertionError(f"no end in {timeout_s:.0f} s: {command}: {error.stdout!r}") from None

    def _device(self, *words: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"STARSD_LAB": str(self.lab_folder)}
        # to a file, not a pipe: the device's processes keep it open for as long as they live
        log = self.folder / f"device-{words[0]}.log"
        with log.open("w") as file:
            done = subprocess.run(
                [str(PROGRAM), *words],
                stdout=file,
                stderr=file,
                timeout=SHORT_S,
                env=environment,
                check=False,
            )
        return subprocess.CompletedProcess(done.args, done.returncode, stderr=log.read_text())

#!/usr/bin/env python3
"""An impaired point-to-point IP link between this host and a network namespace.

Two TUN devices, one in each namespace, joined by this process, which delays, drops and
paces the packets it carries. Real kernel TCP runs over it, so retransmission, congestion
control and half-open connections behave as on a real radio link.

    link.py NAME --host 10.77.1.1 --device 10.77.1.2 --delay-ms 5 --jitter-ms 1 --loss 0.01 --rate-mbit 50

NAME is the namespace (made if missing). While it runs, write settings to the control file
(default /run/starsd-lab/NAME.link), one line of `key=value` words, to change them:

    echo 'delay_ms=40 loss=0.05' > /run/starsd-lab/NAME.link
    echo 'up=0' > /run/starsd-lab/NAME.link      # cable out: every packet is lost
"""

import argparse
import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import selectors
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

TUNSETIFF, IFF_TUN, IFF_NO_PI, CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000
MTU = 1500


@dataclass
class Shape:
    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    loss: float = 0.0
    rate_mbit: float = 0.0  # 0: not paced
    queue_kb: float = 512.0  # what a paced direction holds before it drops
    up: float = 1.0

    def update(self, text: str) -> None:
        for word in text.split():
            key, _, value = word.partition("=")
            if key not in self.__dataclass_fields__:
                raise ValueError(f"unknown setting {key!r}")
            setattr(self, key, float(value))


def sh(*argv: str, check: bool = True) -> None:
    subprocess.run(argv, check=check, stdout=subprocess.DEVNULL, stderr=None if check else subprocess.DEVNULL)


def open_tun(name: str) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    return fd


def open_tun_in(namespace: str, name: str) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    here = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if libc.setns(there, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
        return open_tun(name)
    finally:
        if libc.setns(here, CLONE_NEWNET):
            os._exit(1)
        os.close(here), os.close(there)


class Direction:
    """One way of the link: packets wait in `heap` until their time of arrival."""

    def __init__(self, shape: Shape, out_fd: int):
        self.shape, self.out_fd = shape, out_fd
        self.heap: list[tuple[float, int, bytes]] = []
        self.order = 0
        self.line_free = 0.0  # when the paced line has sent all that was queued
        self.last_arrival = 0.0
        self.carried = self.dropped = 0

    def offer(self, packet: bytes, now: float) -> None:
        s = self.shape
        if not s.up or random.random() < s.loss:
            self.dropped += 1
            return
        start = now
        if s.rate_mbit:
            start = max(now, self.line_free)
            if (start - now) * s.rate_mbit * 1e6 / 8 > s.queue_kb * 1024:
                self.dropped += 1
                return
            start += len(packet) * 8 / (s.rate_mbit * 1e6)
            self.line_free = start
        arrival = start + max(0.0, random.gauss(s.delay_ms, s.jitter_ms)) / 1e3
        arrival = self.last_arrival = max(arrival, self.last_arrival)  # no reordering
        heapq.heappush(self.heap, (arrival, self.order, packet))
        self.order += 1

    def deliver(self, now: float) -> float | None:
        while self.heap and self.heap[0][0] <= now:
            _, _, packet = heapq.heappop(self.heap)
            try:
                os.write(self.out_fd, packet)
                self.carried += 1
            except OSError:
                self.dropped += 1
        return self.heap[0][0] if self.heap else None


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("name")
    ap.add_argument("--host", required=True, help="address of this side")
    ap.add_argument("--device", required=True, help="address of the namespace's side")
    for field in Shape.__dataclass_fields__.values():
        ap.add_argument("--" + field.name.replace("_", "-"), type=float, default=field.default)
    ap.add_argument("--control", type=Path)
    a = ap.parse_args()
    shape = Shape(**{f: getattr(a, f) for f in Shape.__dataclass_fields__})
    control = a.control or Path("/run/starsd-lab") / f"{a.name}.link"
    control.parent.mkdir(parents=True, exist_ok=True)
    control.unlink(missing_ok=True)

    if not Path("/run/netns", a.name).exists():
        sh("ip", "netns", "add", a.name)
    near = open_tun("lab-" + a.name[:11])
    far = open_tun_in(a.name, "lab0")
    sh("ip", "addr", "add", a.host, "peer", a.device, "dev", "lab-" + a.name[:11])
    sh("ip", "link", "set", "lab-" + a.name[:11], "mtu", str(MTU), "up")
    inside = ("ip", "-n", a.name)
    sh(*inside, "addr", "add", a.device, "peer", a.host, "dev", "lab0")
    sh(*inside, "link", "set", "lab0", "mtu", str(MTU), "up")
    sh(*inside, "link", "set", "lo", "up")
    sh(*inside, "route", "add", "default", "dev", "lab0", check=False)
    sys.stdout.write(f"{a.name}: {a.host} <-> {a.device}\n")
    sys.stdout.flush()

    to_device, to_host = Direction(shape, far), Direction(shape, near)
    sel = selectors.DefaultSelector()
    sel.register(near, selectors.EVENT_READ, to_device)
    sel.register(far, selectors.EVENT_READ, to_host)
    seen = 0.0
    while True:
        now = time.monotonic()
        due = [t for t in (to_device.deliver(now), to_host.deliver(now)) if t is not None]
        wait = min([max(0.0, min(due) - time.monotonic())] if due else [0.2])
        for key, _ in sel.select(min(wait, 0.2)):
            now = time.monotonic()
            for _ in range(64):
                try:
                    packet = os.read(key.fd, MTU + 64)
                except BlockingIOError:
                    break
                key.data.offer(packet, now)
        try:
            stamp = control.stat().st_mtime
        except FileNotFoundError:
            continue
        if stamp != seen:
            seen = stamp
            try:
                shape.update(control.read_text())
            except ValueError as e:
                sys.stderr.write(f"{control}: {e}\n")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()

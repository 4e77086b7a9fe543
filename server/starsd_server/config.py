"""What a draft service is told at its start; its processes get it as one line of JSON."""

from __future__ import annotations

import msgspec

from starsd_server.scheduling import Limits

__all__ = ["REAL_ENGINE", "HeadSource", "ServiceConfig"]


REAL_ENGINE = "real"


class HeadSource(msgspec.Struct, frozen=True):
    """A head's folder, and the target it borrows from, where the folder does not hold that part."""

    folder: str
    target: str = ""


class ServiceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One service.

    bind         tcp:// or ipc:// endpoint; port 0 takes a free one
    monitor      endpoint for snapshots; "" publishes none
    keys         folder with the service's key and the trusted devices; "" only on this machine
    folder       private folder for the socket between the processes
    device       "cpu" or "cuda"
    threads      of the head's matrix products on a CPU
    max_steps    head steps of one tree after the first
    kv_mib       what KV slots of all heads may take together; 0: as much as the sessions need
    drain_s      how long rounds are still answered after SIGTERM
    draft_ahead  "on", "off", or "auto": where a step has rows that cost nothing, on an accelerator
    engine       "real", or the engine profile that is emulated, answering with the trees in `trees`
    memory_mib   address space of the gateway: what a hostile peer can make it take
    """

    heads: tuple[HeadSource, ...]
    bind: str
    folder: str
    monitor: str = ""
    keys: str = ""
    name: str = "starsd"
    software: str = "starsd"
    device: str = "cpu"
    precision: str = "auto"
    threads: int = 1
    scheduler: str = "batched"
    limits: Limits = Limits()
    max_len: int = 2048
    max_nodes: int = 64
    top_k: int = 10
    max_steps: int = 7
    kv_mib: int = 0
    drain_s: float = 2.0
    memory_mib: int = 1024
    log_level: str = "info"
    draft_ahead: str = "auto"
    engine: str = REAL_ENGINE
    trees: str = ""

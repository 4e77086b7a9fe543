"""What happened, counted for the monitor, the log and Prometheus; and the snapshots made of it.

The service knows queue and draft times and sizes; what verification made of a tree it knows from the hints
of the next update, or, better, from the edge's own report where there is one.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from starsd_edge.latency import Histogram
from starsd_edge.machine import cpu_name
from starsd_edge.protocol.messages import ErrorCode
from starsd_edge.protocol.server_connection import Greeted, RowsArrived, ServiceOffer
from starsd_edge.protocol.session_table import SessionKey
from starsd_edge.protocol.telemetry import (
    MAX_DEPTH,
    MAX_DEVICES,
    MAX_NAME,
    MAX_SESSIONS_PER_DEVICE,
    DeviceSnapshot,
    EdgeReport,
    EdgeSession,
    EngineSnapshot,
    HeadSnapshot,
    Mode,
    ServiceSnapshot,
    SessionSnapshot,
    SessionState,
    Stage,
    Work,
    added,
)
from starsd_server.ipc import DeviceLink, GatewayState
from starsd_server.scheduling import EvictReason, Limits, Policy, Refuse, Turn
from starsd_server.told import Told

__all__ = ["Recorder", "SessionFacts", "copy_of", "hardware_name"]

log = logging.getLogger("starsd.service")

FRESH_S = 15.0  # a device unheard of for longer than a heartbeat timeout and a half is not connected


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """What only the sessions themselves know, for a snapshot."""

    key: SessionKey
    head: str
    state: SessionState
    committed_len: int
    kv_rows: int


@dataclass(slots=True)
class _SessionRecord:
    opened_s: float
    heard_s: float
    work: Work = field(default_factory=Work)


@dataclass(slots=True)
class _DeviceRecord:
    heard_s: float
    ended: Work = field(default_factory=Work)  # of its sessions that have
    refusals: Counter[str] = field(default_factory=Counter)
    told: Told = field(default_factory=Told)
    software: str = ""
    dtype: str = ""
    greetings: int = 0
    complaint: str = ""
    left: bool = False


class Recorder:
    """Counters of one service, from its start on."""

    def __init__(
        self,
        offer: ServiceOffer,
        limits: Limits,
        policy: Policy,
        hardware: str = "",
        started_s: float | None = None,
    ) -> None:
        self._offer, self._limits, self._policy, self._hardware = offer, limits, policy, hardware
        self._engine = EngineSnapshot()
        self._devices: dict[str, _DeviceRecord] = {}
        self._sessions: dict[SessionKey, _SessionRecord] = {}
        self._sequence = 0
        self._started_s = started_s  # None: the first snapshot's time
        self.rounds = 0

    @property
    def engine(self) -> EngineSnapshot:
        """The engine's counters, live."""
        return self._engine

    # ---------------------------------------------------------------------------------- what happened

    def heard(self, device: str, now_s: float) -> None:
        record = self._devices.get(device)
        if record is not None:
            record.heard_s = now_s

    def greeted(self, key: SessionKey, event: Greeted, now_s: float) -> None:
        device = self._devices.setdefault(key.device, _DeviceRecord(now_s))
        device.software, device.greetings = event.hello.software[:MAX_NAME], device.greetings + 1
        device.dtype = event.hello.dtypes[0][:MAX_NAME]
        device.left = False
        self._sessions.setdefault(key, _SessionRecord(now_s, now_s))
        log.info("session %s of %s: head %s", _name(key), key.device, event.head.name)

    def opened(self, key: SessionKey, now_s: float) -> None:
        self._sessions[key].heard_s = now_s

    def rows_arrived(self, key: SessionKey, event: RowsArrived, now_s: float) -> None:
        session = self._sessions[key]
        session.heard_s = now_s
        work, hints = session.work, event.hints
        if hints is None:
            work.prompt_tokens += len(event.tokens)
            return
        work.tokens += len(event.tokens)
        work.accepted_tokens += hints.num_accepted
        _accept(work.accepted_per_depth, hints.num_accepted)
        if hints.verify_us:
            _time(work, Stage.VERIFY, hints.verify_us / 1e6)
        if hints.link_us:
            _time(work, Stage.LINK, hints.link_us / 1e6)

    def drafted(self, key: SessionKey, nodes: int, queue_s: float, draft_s: float) -> None:
        self.rounds += 1
        work = self._sessions[key].work
        work.num_drafts += 1
        work.draft_tokens += nodes - 1
        work.tree_nodes.add(nodes)
        _time(work, Stage.QUEUE, queue_s)
        _time(work, Stage.DRAFT, draft_s)

    def overtaken(self, key: SessionKey) -> None:
        self._sessions[key].work.stale_trees += 1

    def stepped(self, turns: Iterable[Turn], waited_s: float, step_s: float) -> None:
        """A step ran, for which somebody had waited while no other ran."""
        engine = self._engine
        engine.steps += 1
        engine.busy_s += step_s
        engine.demand_s += max(0.0, waited_s) + step_s
        engine.step_s.add(step_s)
        engine.batch_rows.add(float(max(1, sum(turn.rows for turn in turns))))

    def priced(self, row_price: float) -> None:
        """What a row of a tree has to bring from now on: `sharing.Sharing`."""
        self._engine.row_price = row_price

    def narrowed(self) -> None:
        """Rows of a tree are left out for that price, the first of it."""
        self._engine.narrowed_trees += 1

    def went_ahead(self, step_s: float) -> None:
        """A step ran that nobody waited for."""
        self._engine.ahead_s += step_s

    def drafted_ahead(self, *, used: bool) -> None:
        """The device has answered the round of a tree that was drafted ahead: whether that leads on."""
        self._engine.ahead_drafts += 1
        self._engine.ahead_hits += used

    def pinged(self, key: SessionKey) -> None:
        if key in self._sessions:
            self._sessions[key].heard_s = max(self._sessions[key].heard_s, self._devices[key.device].heard_s)

    def reported(self, device: str, body: EdgeReport, now_s: float) -> None:
        record = self._devices.setdefault(device, _DeviceRecord(now_s))
        try:
            record.told.take(body)
        except ValueError as error:
            record.refusals["report"] += 1
            record.complaint = str(error)
            log.warning("device %s: %s", device, error)

    def refused(self, key: SessionKey, refusal: Refuse) -> None:
        reason = refusal.reason.value
        self._engine.refusals[reason] = self._engine.refusals.get(reason, 0) + 1
        if key.device in self._devices:
            self._devices[key.device].refusals[reason] += 1
        log.info(
            "session %s of %s: refused (%s), retry after %.1f s",
            _name(key),
            key.device,
            reason,
            refusal.retry_after_s,
        )

    def violated(self, key: SessionKey, code: ErrorCode, text: str) -> None:
        if key.device in self._devices:
            device = self._devices[key.device]
            device.refusals[code.name.lower()] += 1
            device.complaint = text[:240]
        log.warning("session %s of %s: %s: %s", _name(key), key.device, code.name, text)

    def evicted(self, key: SessionKey, reason: EvictReason) -> None:
        self._engine.evictions += 1
        log.info("session %s of %s: evicted (%s)", _name(key), key.device, reason.value)

    def lease_over(self, key: SessionKey) -> None:
        log.info("session %s of %s: lease over", _name(key), key.device)

    def left(self, key: SessionKey) -> None:
        """The edge ends its session. With the last one the device is gone, and not lost."""
        if key.device in self._devices:
            others = any(other.device == key.device for other in self._sessions if other != key)
            self._devices[key.device].left = not others

    def closed(self, key: SessionKey) -> None:
        session = self._sessions.pop(key, None)
        if session is not None:
            device = self._devices[key.device]
            device.ended = added([device.ended, session.work])
        log.info("session %s of %s: closed", _name(key), key.device)

    # -------------------------------------------------------------------------------------- snapshots

    def snapshot(
        self, now_s: float, facts: list[SessionFacts], gateway: GatewayState, draining: bool
    ) -> ServiceSnapshot:
        """The service at this moment; cheap enough for twice a second."""
        self._started_s = now_s if self._started_s is None else self._started_s
        self._sequence += 1
        engine = self._engine
        engine.hardware, engine.scheduler = self._hardware, self._policy.value
        engine.queue_depth = sum(fact.state is SessionState.QUEUED for fact in facts)
        engine.active_sessions = sum(fact.state is not SessionState.EVICTED for fact in facts)
        engine.max_sessions = self._limits.max_sessions
        engine.kv_rows_used = sum(fact.kv_rows for fact in facts)
        engine.kv_rows_total = sum(head.max_len for head in self._offer.heads) * self._limits.max_sessions
        return ServiceSnapshot(
            boot_id=f"{self._offer.boot_id:016x}",
            sequence=self._sequence,
            uptime_s=now_s - self._started_s,
            service=self._offer.service[:MAX_NAME],
            software=self._offer.software[:MAX_NAME],
            draining=draining,
            heads=[
                HeadSnapshot(head.name[:MAX_NAME], head.identity.target[:MAX_NAME])
                for head in self._offer.heads
            ],
            engine=engine,
            gateway=gateway.gateway,
            devices=[
                self._device(name, record, facts, gateway.devices.get(name, DeviceLink()), now_s)
                for name, record in islice(self._devices.items(), MAX_DEVICES)
            ],
        )

    def _device(
        self, name: str, record: _DeviceRecord, facts: list[SessionFacts], link: DeviceLink, now_s: float
    ) -> DeviceSnapshot:
        told, report = record.told.sessions, record.told.newest
        facts = [fact for fact in facts if fact.key.device == name]
        seen = added([record.ended, *(self._sessions[fact.key].work for fact in facts)])
        seen.bytes_up, seen.bytes_down = link.bytes_up, link.bytes_down
        return DeviceSnapshot(
            device=name[:MAX_NAME],
            fingerprint=link.fingerprint,
            address=link.address,
            software=record.software,
            feature_dtype=record.dtype,
            connected=now_s - record.heard_s < FRESH_S,
            quiet_s=now_s - record.heard_s,
            left=record.left,
            reason=record.complaint,
            reconnects=max(0, record.told.reconnects if report is not None else record.greetings - 1),
            jitter_s=report.jitter_s if report is not None else 0.0,
            refusals=dict(record.refusals),
            plain_tokens_per_s=report.plain_tokens_per_s if report is not None else None,
            work=_device_work(seen, record.told.work),
            sessions=[
                self._session(fact, told.get(_name(fact.key)), now_s)
                for fact in facts[:MAX_SESSIONS_PER_DEVICE]
            ],
            board=record.told.board,
            energy=record.told.energy,
        )

    def _session(self, fact: SessionFacts, told: EdgeSession | None, now_s: float) -> SessionSnapshot:
        record = self._sessions[fact.key]
        own = record.work
        return SessionSnapshot(
            session=_name(fact.key),
            head=fact.head[:MAX_NAME],
            state=fact.state,
            mode=told.mode if told is not None else Mode.DRAFTING if own.num_drafts else Mode.IDLE,
            reason=told.reason if told is not None else "",
            committed_len=fact.committed_len,
            kv_rows=fact.kv_rows,
            age_s=now_s - record.opened_s,
            quiet_s=now_s - record.heard_s,
            work=_told_and_seen(told.work, own) if told is not None else own,
        )


def hardware_name(threads: int) -> str:
    """What the engine runs on, for people."""
    return f"{cpu_name()}, {threads} thread{'s' if threads > 1 else ''}"[:80]


def _device_work(seen: Work, told: Work | None) -> Work:
    """An edge knows of its rounds what never reaches the service: plain steps, late trees, fallbacks."""
    return _told_and_seen(told, seen) if told is not None else seen


def _told_and_seen(told: Work, seen: Work) -> Work:
    """What the edge counts, with the stages and bytes that the service itself measures."""
    stages = {**told.stages, **{stage: seen.stages[stage] for stage in SEEN_HERE if stage in seen.stages}}
    return msgspec.structs.replace(told, stages=stages, bytes_up=seen.bytes_up, bytes_down=seen.bytes_down)


# LINK comes with every update (Hints), so that the service has it round by round.
SEEN_HERE = (Stage.LINK, Stage.QUEUE, Stage.DRAFT)


def copy_of(engine: EngineSnapshot) -> EngineSnapshot:
    """The counters as they are now."""
    return msgspec.json.decode(msgspec.json.encode(engine), type=EngineSnapshot)


def _name(key: SessionKey) -> str:
    return f"{key.session:016x}"


def _accept(per_depth: list[int], num_accepted: int) -> None:
    levels = min(num_accepted, MAX_DEPTH)
    per_depth.extend([0] * (levels - len(per_depth)))
    for depth in range(levels):
        per_depth[depth] += 1


def _time(work: Work, stage: Stage, seconds: float) -> None:
    times = work.stages.get(stage)
    if times is None:
        times = work.stages[stage] = Histogram()
    times.add(max(0.0, seconds))

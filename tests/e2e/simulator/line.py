"""A bad line between an edge and the service, and the edge's end of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from starsd_edge.decoding.roles import DrafterState, Update
from starsd_edge.decoding.tree import DraftTree
from starsd_edge.protocol.codec import Frames
from starsd_edge.protocol.edge_connection import EdgeConnection
from starsd_edge.protocol.edge_events import Connect, Disconnect, LinkEvent, TreeArrived
from starsd_edge.protocol.greeting import HelloBody
from tests.e2e.simulator.service import IDENTITY, SimulatedService
from tests.e2e.simulator.target import MAX_LEN
from tests.e2e.simulator.world import World

__all__ = ["EdgeLink", "Weather"]


@dataclass(slots=True)
class Weather:
    """What happens to a message on its way. Shares 0..1, seconds."""

    delay_s: float = 0.001
    jitter_s: float = 0.0
    drop: float = 0.0
    double: float = 0.0
    reorder: float = 0.0  # share of messages that are held up so that later ones pass them
    down: bool = False  # nothing gets through, and nobody is told


class EdgeLink:
    """A Drafter over a simulated line: EdgeConnection, with the world as its socket and clock."""

    def __init__(self, world: World, service: SimulatedService, weather: Weather, device: str) -> None:
        self.weather = weather
        self.connection = EdgeConnection(
            world.chance.getrandbits(64),
            HelloBody(
                identity=IDENTITY,
                digest=IDENTITY.digest(),
                device=device,
                software="0",
                dtypes=[world.chance.choice(["fp16", "bf16"])],
                max_len=MAX_LEN,
                max_nodes=32,
            ),
            world.chance.random,
        )
        self.trees: deque[DraftTree] = deque()
        self._world, self._service, self._device = world, service, device
        self._route: int | None = None  # of the connection that stands
        self._arrives_s: dict[str, float] = {"up": 0.0, "down": 0.0}
        world.watch(self.connection.next_wake_s, self._tick)

    # ---------------------------------------------------------------------------- what the loop calls

    def start(self, first_token: int) -> None:
        self.trees.clear()
        self.connection.start(first_token, self._world.now_s)
        self._flush()

    def update(self, update: Update) -> None:
        self.connection.update(update, self._world.now_s)
        self._flush()

    def poll(self, timeout_s: float) -> DraftTree | None:
        if timeout_s > 0:
            self._world.run_until(self._world.now_s + timeout_s, lambda: bool(self.trees))
        return self.trees.popleft() if self.trees else None

    def rollback(self, committed_len: int) -> None:
        self.trees.clear()
        self.connection.rollback(committed_len, self._world.now_s)
        self._flush()

    def state(self) -> DrafterState:
        return self.connection.drafter_state()

    @property
    def told_len(self) -> int:
        """Committed tokens that the loop has told."""
        return self.connection._uplink.history.committed_len

    def close(self) -> None:
        self._obey(self.connection.close(self._world.now_s))

    # ------------------------------------------------------------------------------------- the line

    def cut(self) -> None:
        """The connection is reset: the edge is told."""
        if self._route is not None:
            self._obey(self.connection.lost("reset", self._world.now_s))

    def _tick(self) -> None:
        self._obey(self.connection.tick(self._world.now_s))

    def _obey(self, events: list[LinkEvent]) -> None:
        for event in events:
            match event:
                case TreeArrived(tree):
                    if not event.ahead:
                        self.trees.clear()
                    self.trees.append(tree)
                case Connect():
                    self._connect()
                case Disconnect():
                    self._disconnect()
        self._flush()

    def _connect(self) -> None:
        self._disconnect()
        if self.weather.down:
            return  # a lost SYN: the connection's own patience ends it
        route = self._world.chance.getrandbits(48)
        self._route = route
        self._arrives_s = {"up": 0.0, "down": 0.0}
        self._service.replies[route] = lambda frames: self._carry("down", route, frames)
        self._world.after(2 * self.weather.delay_s, lambda: self._connected(route))

    def _connected(self, route: int) -> None:
        if route == self._route:
            self._obey(self.connection.connected(self._world.now_s))

    def _disconnect(self) -> None:
        if self._route is not None:
            # What was sent already may still arrive: only replies have nowhere to go.
            self._service.replies.pop(self._route, None)
            self._route = None

    def _flush(self) -> None:
        for frames in self.connection.take_frames():
            if self._route is not None:
                self._carry("up", self._route, frames)

    def _carry(self, way: str, route: int, frames: Frames) -> None:
        weather, chance = self.weather, self._world.chance
        if weather.down or chance.random() < weather.drop:
            return
        copies = 2 if chance.random() < weather.double else 1
        for _ in range(copies):
            arrives_s = self._world.now_s + weather.delay_s + chance.random() * weather.jitter_s
            if chance.random() < weather.reorder:
                arrives_s += 3 * (weather.delay_s + weather.jitter_s)
            else:
                arrives_s = self._arrives_s[way] = max(arrives_s, self._arrives_s[way])
            self._world.after(arrives_s - self._world.now_s, self._delivery(way, route, frames))

    def _delivery(self, way: str, route: int, frames: Frames) -> Callable[[], None]:
        def deliver() -> None:
            if self.weather.down:
                return
            if way == "up":
                self._service.receive(self._device, route, frames)
            elif route == self._route:
                self._obey(self.connection.receive(frames, self._world.now_s))

        return deliver

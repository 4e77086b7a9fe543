"""Serves the metrics of watched services over HTTP, for a Prometheus on this machine.

The exporter is one more watcher: it runs beside Prometheus and reaches services over their encrypted link.
HTTP itself has neither encryption nor keys, so it stays on loopback.
"""

from __future__ import annotations

import http.server
import threading
from collections.abc import Callable

from starsd_edge.errors import ResourceError, UsageError
from starsd_edge.link.sockets import is_local
from starsd_edge.monitor.exposition import Watched, exposition
from starsd_edge.monitor.feed import Feed
from starsd_edge.monitor.prometheus import METRICS
from starsd_edge.protocol.telemetry import ServiceSnapshot

__all__ = ["Exporter"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
REQUEST_TIMEOUT_S = 10.0  # a silent client does not hold a thread for longer
POLL_S = 0.2


class Exporter:
    """Follows `feed` and answers GET /metrics on host:port (port 0: any free one).

    Raises UsageError off loopback, ResourceError where the port is taken."""

    def __init__(self, feed: Feed, host: str, port: int) -> None:
        if not is_local(f"tcp://{host}:{port}"):
            raise UsageError(
                f"metrics are served on this machine only, not on {host}: run the exporter beside Prometheus"
            )
        self._feed = feed
        self._snapshots: dict[int, ServiceSnapshot] = {}
        self._lock = threading.Lock()
        self._watched: list[Watched] = []
        try:
            self._server = http.server.ThreadingHTTPServer((host, port), handler(self.text))
        except OSError as error:
            raise ResourceError(f"cannot serve metrics on {host}:{port}: {error.strerror}") from error
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def port(self) -> int:
        """The port it answers on."""
        return int(self._server.server_address[1])

    def text(self) -> str:
        """What /metrics answers right now."""
        with self._lock:
            watched = list(self._watched)
        return exposition(METRICS, watched)

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Follow the feed until `until` says so, or an interrupt."""
        self._thread.start()
        try:
            while not until():
                for arrival in self._feed.poll(POLL_S):
                    self._snapshots[arrival.source] = arrival.snapshot
                self._look_around()
        finally:
            self._server.shutdown()
            self._server.server_close()

    def _look_around(self) -> None:
        links = self._feed.links
        watched = [
            Watched(name, links[index].state, self._snapshots.get(index))
            for index, name in enumerate(self._feed.names)
        ]
        with self._lock:
            self._watched = watched


def handler(text: Callable[[], str]) -> type[http.server.BaseHTTPRequestHandler]:
    """A request handler class that answers with `text`."""

    class Metrics(http.server.BaseHTTPRequestHandler):
        timeout = REQUEST_TIMEOUT_S
        server_version = "starsd"
        sys_version = ""

        def do_GET(self) -> None:  # the name http.server calls
            if self.path.split("?")[0] != "/metrics":
                self.send_error(404, "only /metrics is here")
                return
            body = text().encode()
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Scrapes are not news."""

    return Metrics

"""A real server with a toy model on a free port of this machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import openai
import uvicorn

from starsd_edge.chat.settings import ChatSettings
from starsd_edge.chat.speaker import Speaker
from starsd_edge.endpoint.app import Endpoint
from starsd_edge.endpoint.guard import Guard
from starsd_edge.endpoint.server import DRAIN_S, make_server, open_socket
from starsd_edge.endpoint.worker import Worker

try:  # whichever the openai package came with
    import httpx2 as httpx
except ImportError:
    import httpx  # type: ignore[no-redef]

__all__ = ["MODEL", "Served", "httpx", "serving"]

MODEL = "toy"


@dataclass(frozen=True)
class Served:
    """A running server."""

    port: int
    endpoint: Endpoint
    server: uvicorn.Server

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, api_key: str = "none") -> openai.OpenAI:
        """The real client, which must not hide a failure by trying again."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=60)


@contextmanager
def serving(
    speaker: Speaker,
    *,
    max_waiting: int = 8,
    guard: Guard | None = None,
    keep_alive_s: float = 10.0,
    body_timeout_s: float = 60.0,
    drain_s: float = DRAIN_S,
) -> Iterator[Served]:
    worker = Worker(speaker, max_waiting)
    endpoint = Endpoint(
        worker,
        MODEL,
        ChatSettings(),
        guard or Guard(),
        created=0,
        keep_alive_s=keep_alive_s,
        body_timeout_s=body_timeout_s,
    )
    server = make_server(endpoint, drain_s=drain_s)
    with open_socket("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            while not server.started:
                time.sleep(0.005)
                assert thread.is_alive()
            yield Served(listener.getsockname()[1], endpoint, server)
        finally:
            worker.close()
            server.should_exit = True
            thread.join()
            speaker.close()

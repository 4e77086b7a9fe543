"""A real server with a toy model on a free port of this machine."""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import openai
import uvicorn
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from starsd_edge.chat.settings import ChatSettings
from starsd_edge.chat.speaker import Speaker
from starsd_edge.defaults import DRAIN_S
from starsd_edge.endpoint.app import Endpoint
from starsd_edge.endpoint.body import BodyReader
from starsd_edge.endpoint.guard import Guard
from starsd_edge.endpoint.server import Tls, make_server, open_socket
from starsd_edge.endpoint.worker import Worker

try:  # whichever the openai package came with
    import httpx2 as httpx
except ImportError:
    import httpx  # type: ignore[no-redef]

__all__ = ["MODEL", "Served", "httpx", "self_signed", "serving"]

MODEL = "toy"


@dataclass(frozen=True)
class Served:
    """A running server."""

    port: int
    endpoint: Endpoint
    server: uvicorn.Server
    clients: ExitStack  # closed before the server is

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, api_key: str = "none") -> openai.OpenAI:
        """The real client, which must not hide a failure by trying again."""
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=60)
        return self.clients.enter_context(client)


@contextmanager
def serving(
    speaker: Speaker,
    *,
    max_waiting: int = 8,
    guard: Guard | None = None,
    keep_alive_s: float = 10.0,
    body_timeout_s: float = 60.0,
    drain_s: float = DRAIN_S,
    tls: Tls | None = None,
    most: int | None = None,
) -> Iterator[Served]:
    worker = Worker(speaker, max_waiting)
    endpoint = Endpoint(
        worker,
        MODEL,
        ChatSettings(),
        guard or Guard(),
        created=0,
        keep_alive_s=keep_alive_s,
        bodies=BodyReader(body_timeout_s),
    )
    server = make_server(endpoint, tls, drain_s, most)
    with open_socket("127.0.0.1", 0) as listener, ExitStack() as clients:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            while not server.started:
                time.sleep(0.005)
                assert thread.is_alive()
            yield Served(listener.getsockname()[1], endpoint, server, clients)
        finally:
            clients.close()
            worker.close()
            server.should_exit = True
            thread.join()
            speaker.close()


def self_signed(folder: Path) -> tuple[Path, Path]:
    """A certificate for this machine's loopback name, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    files = folder / "cert.pem", folder / "key.pem"
    files[0].write_bytes(certificate.public_bytes(Encoding.PEM))
    files[1].write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return files

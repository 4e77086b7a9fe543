"""The one module that speaks SSH: paramiko behind a small typed front.

A `Connection` runs POSIX sh scripts and hands out SFTP channels. Every hop's host key is verified before
anything about the user is sent. All of paramiko's and the socket's errors come out as UnreachableError,
AuthenticationError or DeployError.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import os
import shlex
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import paramiko
from paramiko.agent import AgentSSH
from paramiko.pkey import PublicBlob, UnknownKeyType

from starsd_deploy.known_hosts import (
    HostKey,
    Verdict,
    append_host,
    fingerprint,
    host_pattern,
    known_kinds,
    look_up,
)
from starsd_deploy.sftp_lane import SftpLane
from starsd_deploy.ssh_config import Hop, Route
from starsd_edge.errors import AuthenticationError, ConfigError, DeployError, StarSDError, UnreachableError

__all__ = ["CLOSING_S", "Completed", "Connection", "NoChannelError", "PasswordPrompt", "Running", "connect"]

# GCM first: on hosts without hardware AES both are slow, elsewhere it is a third faster than CTR plus HMAC.
CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "aes128-ctr", "aes192-ctr", "aes256-ctr")
# The kernel gives a peer up that has not acknowledged for this long: a pulled cable ends in an error.
TCP_USER_TIMEOUT_MS = 30_000
COMMAND_TIMEOUT_S = 120.0
# A board that swaps, or boots, takes its time between the TCP connection and the login.
SLOW_LOGIN_S = 60.0
# What a server may take to count a channel as closed, and how often it is asked meanwhile.
CLOSING_S, ASK_AGAIN_S = 5.0, 0.1
# paramiko writes about every refused channel, which the one who asked for it tells in its place.
logging.getLogger("paramiko").addHandler(logging.NullHandler())
SIGKILL_STATUS = -1  # what paramiko reports when the command had no exit status

PasswordPrompt = Callable[[str], str]


class NoChannelError(DeployError):
    """Raised when a server that can be reached opens no more channels on a connection."""


@dataclass(frozen=True, slots=True)
class Completed:
    """A finished command. `status` is -1 if a signal or a lost connection ended it."""

    status: int
    stdout: str
    stderr: str


class Connection:
    """A logged-in connection. Thread-safe: each command and SFTP channel has its own SSH channel."""

    def __init__(self, transports: list[paramiko.Transport], hop: Hop) -> None:
        self._transports = transports
        self.hop = hop
        self._count_lock = threading.Lock()
        self.bytes_sent = 0  # content sent by transfers, for reports

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def name(self) -> str:
        """The device as the user wrote it."""
        return self.hop.alias

    @property
    def alive(self) -> bool:
        """Whether the transport still stands, as far as is known."""
        return bool(self._transports[-1].is_active())

    def count_sent(self, count: int) -> None:
        """Note content bytes that a transfer sent."""
        with self._count_lock:
            self.bytes_sent += count

    def close(self) -> None:
        """End the connection and its hops; running commands on the device are left to themselves."""
        for transport in reversed(self._transports):
            transport.close()

    def run(self, script: str, *, timeout_s: float = COMMAND_TIMEOUT_S) -> Completed:
        """Feed a script to `sh -s`; nothing of it shows in a process list.

        Raises:
            UnreachableError: the connection was lost, or the script did not end in time.
        """
        return self.run_command(("sh", "-s"), script.encode(), timeout_s=timeout_s)

    def run_command(
        self, argv: tuple[str, ...], stdin: bytes = b"", *, timeout_s: float = COMMAND_TIMEOUT_S
    ) -> Completed:
        """Run an argument list with bytes on stdin.

        Raises:
            UnreachableError: as `run`.
        """
        with self.started(argv) as running:
            running.feed(stdin)
            return running.finish(timeout_s)

    @contextlib.contextmanager
    def started(self, argv: tuple[str, ...]) -> Iterator[Running]:
        """Start an argument list, to be fed while it runs.

        Raises:
            UnreachableError: as `run`.
        """
        with self._translated():
            channel = self._session()
            with contextlib.closing(channel):
                channel.exec_command(shlex.join(argv))
                yield Running(self, channel)

    def stream(self, argv: tuple[str, ...], stdin: bytes = b"") -> Iterator[str]:
        """Run an argument list and yield its output by lines until it ends or the caller stops.

        Raises:
            UnreachableError: the connection was lost.
        """
        with self._translated():
            channel = self._session()
            with contextlib.closing(channel):
                channel.set_combine_stderr(True)
                channel.exec_command(shlex.join(argv))
                channel.sendall(stdin)
                channel.shutdown_write()
                for line in channel.makefile("r", -1):
                    yield str(line).rstrip("\n")

    @contextlib.contextmanager
    def sftp_lane(self, patience_s: float) -> Iterator[SftpLane]:
        """An SFTP channel of its own; asked for so long if there are too many.

        Raises:
            NoChannelError: the server opens no more channels.
            UnreachableError: the connection was lost.
            DeployError: the device refused a file operation.
        """
        with self._translated(), contextlib.closing(self._session(patience_s)) as channel:
            try:
                channel.invoke_subsystem("sftp")
            except paramiko.SSHException as error:
                if not self.alive:
                    raise
                raise DeployError(
                    f"{self.name}: no SFTP there; is `Subsystem sftp` set in its sshd_config?"
                ) from error
            yield SftpLane(channel)

    def _session(self, patience_s: float = CLOSING_S) -> paramiko.Channel:
        """A new channel; a server that has too many is asked again for a while, as some may be closing."""
        until_s = time.monotonic() + patience_s
        while True:
            try:
                return self._transports[-1].open_session(timeout=self.hop.timeout_s)
            except paramiko.SSHException as error:
                # of several that are refused at once, only one is given the server's reason
                refused = isinstance(error, paramiko.ChannelException) or "Unable to open" in str(error)
                if not refused or not self.alive:
                    raise
                if time.monotonic() >= until_s:
                    raise NoChannelError(
                        f"{self.name}: sshd opens no further channel; see MaxSessions in its sshd_config"
                    ) from error
            threading.Event().wait(ASK_AGAIN_S)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except StarSDError:
            raise
        except TimeoutError as error:
            raise UnreachableError(f"{self.name}: no answer in time") from error
        except (paramiko.SSHException, EOFError, ConnectionError) as error:
            raise UnreachableError(f"{self.name}: the connection was lost ({error or 'closed'})") from error
        except OSError as error:
            if not self.alive:
                raise UnreachableError(f"{self.name}: the connection was lost ({error})") from error
            raise DeployError(f"{self.name}: {error}") from error


class Running:
    """A command that runs. Both of its streams are read at once: one left full blocks it for good."""

    def __init__(self, connection: Connection, channel: paramiko.Channel) -> None:
        self._connection = connection
        self._channel = channel
        self._streams: tuple[list[bytes], list[bytes]] = ([], [])
        receivers = (channel.recv, channel.recv_stderr)
        self._readers = [
            threading.Thread(target=_read_into, args=pair, daemon=True)
            for pair in zip(receivers, self._streams, strict=True)
        ]
        for reader in self._readers:
            reader.start()

    def feed(self, data: bytes) -> None:
        """Write to its stdin; a command may end without reading it all."""
        with contextlib.suppress(OSError):
            self._channel.sendall(data)

    def finish(self, timeout_s: float) -> Completed:
        """Close its stdin and wait for its end.

        Raises:
            UnreachableError: the connection was lost, or it did not end in time.
        """
        with contextlib.suppress(OSError):
            self._channel.shutdown_write()
        until_s = time.monotonic() + timeout_s
        for reader in self._readers:
            reader.join(max(0.0, until_s - time.monotonic()))
            if reader.is_alive():
                raise UnreachableError(f"{self._connection.name}: no answer in time")
        status = self._channel.recv_exit_status()
        if status == SIGKILL_STATUS and not self._connection.alive:
            raise UnreachableError(
                f"{self._connection.name}: the connection was lost; run the same command again to go on"
            )
        output, errors = (b"".join(pieces).decode("utf-8", "replace") for pieces in self._streams)
        return Completed(status, output, errors)


def connect(route: Route, ask_password: PasswordPrompt | None = None) -> Connection:
    """Open every hop of a route, verify its host key, log in.

    `ask_password` is called with a question when no key is accepted, or a key file has a passphrase; without
    it such keys are skipped.

    Raises:
        UnreachableError: no route, refused, timed out, or no common algorithm.
        AuthenticationError: a host key is not the known one, or no credential was accepted.
        ConfigError: a new host key cannot be recorded.
    """
    transports: list[paramiko.Transport] = []
    try:
        for hop in route.hops:
            sock = _socket(hop, transports[-1] if transports else None)
            transport = paramiko.Transport(sock)
            transports.append(transport)
            _handshake(transport, hop)
            _log_in(transport, hop, ask_password)
    except BaseException:
        for transport in reversed(transports):
            transport.close()
        raise
    return Connection(transports, route.device)


def _socket(hop: Hop, previous: paramiko.Transport | None) -> Any:
    """A TCP connection, a proxy command's pipe, or a channel through the previous hop."""
    try:
        if previous is not None:
            return previous.open_channel("direct-tcpip", (hop.host, hop.port), ("", 0), timeout=hop.timeout_s)
        if hop.proxy_command:
            return paramiko.ProxyCommand(hop.proxy_command)
        sock = socket.create_connection((hop.host, hop.port), hop.timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, TCP_USER_TIMEOUT_MS)
        return sock
    except (OSError, paramiko.SSHException) as error:
        raise UnreachableError(
            f"{hop.alias}: cannot reach {hop.host} port {hop.port} ({_reason(error)}); is it on, "
            "and is the address right?"
        ) from error


def _reason(error: OSError | paramiko.SSHException) -> str:
    """In words: no error numbers, no class names."""
    if isinstance(error, TimeoutError):
        return "no answer"
    if isinstance(error, paramiko.ChannelException):
        return f"the jump host says: {error.text}"
    return getattr(error, "strerror", None) or str(error)


def _handshake(transport: paramiko.Transport, hop: Hop) -> None:
    name = host_pattern(hop.host_key_name, hop.port)
    texts = tuple(_text(path) for path in hop.known_hosts)
    security = transport.get_security_options()
    security.ciphers = [cipher for cipher in CIPHERS if cipher in security.ciphers]
    kinds = known_kinds(texts, name)
    preferred = [kind for kind in security.key_types if _family(kind) in {_family(k) for k in kinds}]
    security.key_types = preferred + [kind for kind in security.key_types if kind not in preferred]
    transport.set_keepalive(hop.keepalive_s)
    transport.banner_timeout = transport.auth_timeout = max(hop.timeout_s, SLOW_LOGIN_S)
    try:
        transport.start_client(timeout=hop.timeout_s)
        if not transport.initial_kex_done:  # paramiko returns at its timeout as if all were well
            raise _unfinished(transport, hop)
        remote = transport.get_remote_server_key()
    except (paramiko.SSHException, OSError, EOFError) as error:
        hint = ""
        if "host key" in str(error).lower() or "algorithm" in str(error).lower():
            hint = "; a server that offers only ssh-rsa (SHA-1) must be updated first"
        raise UnreachableError(
            f"{hop.alias}: SSH handshake with {hop.host} failed ({error}){hint}"
        ) from error
    _check_host_key(HostKey(remote.get_name(), remote.asbytes()), hop, texts, name)


def _unfinished(transport: paramiko.Transport, hop: Hop) -> UnreachableError:
    where = f"{hop.alias}: {hop.host} port {hop.port}"
    longer = "ConnectTimeout in ~/.ssh/config gives a slow board longer"
    if transport.remote_version:
        return UnreachableError(f"{where} did not end the SSH handshake in {hop.timeout_s:g} s; {longer}")
    return UnreachableError(
        f"{where} accepts and says nothing for {hop.timeout_s:g} s: is it an SSH server? If so, {longer}"
    )


def _family(kind: str) -> str:
    """rsa-sha2-512 signs with an ssh-rsa key."""
    return "ssh-rsa" if "rsa" in kind else kind


def _check_host_key(key: HostKey, hop: Hop, texts: tuple[str, ...], name: str) -> None:
    found = fingerprint(key)
    if hop.host_key_pin:
        if found != hop.host_key_pin:
            raise AuthenticationError(
                f"{hop.alias}: the host key is {found}, the inventory pins {hop.host_key_pin}: if the "
                "device was reflashed, write the new fingerprint into the inventory"
            )
        return
    verdict = look_up(texts, name, key)
    if verdict is Verdict.REVOKED:
        raise AuthenticationError(
            f"{hop.alias}: the host key {found} is marked @revoked in {hop.known_hosts[0]}"
        )
    if verdict is Verdict.CHANGED:
        raise AuthenticationError(
            f"{hop.alias}: the host key of {name} is not the known one but {found}. A reflashed board "
            "has a new key; so has a stranger in between. Compare it on the device (ssh-keygen -lf "
            "/etc/ssh/ssh_host_ed25519_key.pub), then accept it: "
            f"ssh-keygen -R {shlex.quote(name)} -f {shlex.quote(hop.known_hosts[0])}"
        )
    if verdict is Verdict.UNKNOWN:
        if not hop.accept_new:
            raise AuthenticationError(
                f"{hop.alias}: the host key {found} of {name} is unknown and StrictHostKeyChecking forbids "
                f"to record it; check it and run: ssh {shlex.quote(hop.alias)}"
            )
        try:
            append_host(Path(hop.known_hosts[0]), name, key)
        except OSError as error:
            raise ConfigError(
                f"{hop.alias}: its host key cannot be recorded: {hop.known_hosts[0]}: {error.strerror}"
            ) from error


def _log_in(transport: paramiko.Transport, hop: Hop, ask_password: PasswordPrompt | None) -> None:
    tried: list[str] = []
    try:
        with contextlib.closing(_Agent(hop.agent_socket)) as agent:
            if _log_in_by_key(transport, hop, _keys(hop, agent, ask_password, tried), tried):
                return
        if ask_password is not None and transport.is_active():
            tried.append("password")
            with contextlib.suppress(paramiko.AuthenticationException):
                transport.auth_password(hop.user, ask_password(f"Password of {hop.user}@{hop.host}: "))
            if transport.is_authenticated():
                return
    except (paramiko.SSHException, OSError, EOFError) as error:
        raise UnreachableError(
            f"{hop.alias}: the connection was lost at login ({error or 'closed'})"
        ) from error
    attempts = ", ".join(tried) or "nothing: no key found"
    raise AuthenticationError(
        f"{hop.alias}: {hop.host} accepts no credential of {hop.user} (tried {attempts});"
        f" copy one with: ssh-copy-id {hop.user}@{hop.host}"
    )


def _log_in_by_key(
    transport: paramiko.Transport, hop: Hop, keys: Iterator[tuple[str, paramiko.PKey]], tried: list[str]
) -> bool:
    for label, key in keys:
        tried.append(label)
        with contextlib.suppress(paramiko.AuthenticationException):
            transport.auth_publickey(hop.user, key)
            if transport.is_authenticated():
                return True
        if not transport.is_active():
            return False
    return False


def _keys(
    hop: Hop, agent: _Agent, ask_password: PasswordPrompt | None, notes: list[str]
) -> Iterator[tuple[str, paramiko.PKey]]:
    """The inventory's and config's key files first, each with its agent twin, then the agent's others; each
    with its certificates before by itself."""
    certificate = _certificate(hop.certificate, notes)
    for label, key in _bare_keys(hop, agent, ask_password, notes):
        found = [] if key.public_blob is None else [(label, key.public_blob)]
        if certificate is not None and _certifies(certificate, key):
            found.insert(0, (f"{label} with {hop.certificate}", certificate))
        for with_it, blob in found:
            key.public_blob = blob
            yield with_it, key
        key.public_blob = None
        yield f"{label} (without its certificate)" if found else label, key


def _bare_keys(
    hop: Hop, agent: _Agent, ask_password: PasswordPrompt | None, notes: list[str]
) -> Iterator[tuple[str, paramiko.PKey]]:
    """The same, each once; `public_blob` is the certificate beside it, if there is one."""
    held = agent.get_keys()
    wanted = {blob for path in hop.identities if (blob := _public_blob(path))}
    for key in held:
        if key.asbytes() in wanted:
            yield f"agent key {key.get_name()}", key
    for path in hop.identities:
        try:
            yield path, paramiko.PKey.from_path(path)
        except (paramiko.PasswordRequiredException, TypeError):  # TypeError comes from cryptography
            if any(key.asbytes() == _public_blob(path) for key in held):
                continue
            if ask_password is None:
                notes.append(f"{path} (has a passphrase, and no agent holds it)")
                continue
            secret: Any = ask_password(f"Passphrase of {path}: ").encode()  # 5.1 wants bytes, and says str
            with contextlib.suppress(paramiko.SSHException, ValueError):  # a wrong passphrase
                yield path, paramiko.PKey.from_path(path, password=secret)
        except (OSError, paramiko.SSHException, UnknownKeyType, ValueError) as error:
            notes.append(f"{path} ({error or type(error).__name__})")
    if not hop.identities_only:
        for key in held:
            if key.asbytes() not in wanted:
                yield f"agent key {key.get_name()}", key


def _certificate(path: str, notes: list[str]) -> PublicBlob | None:
    if not path:
        return None
    try:
        return PublicBlob.from_string(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, paramiko.SSHException) as error:
        notes.append(f"{path} ({getattr(error, 'strerror', None) or 'no certificate'})")
        return None


def _certifies(certificate: PublicBlob, key: paramiko.PKey) -> bool:
    """Behind its type and a nonce a certificate has the fields that a public key has behind its type."""
    public, certified = paramiko.Message(key.asbytes()), paramiko.Message(certificate.key_blob)
    public.get_string()
    certified.get_string()
    certified.get_string()
    return certified.get_remainder().startswith(public.get_remainder())


class _Agent(AgentSSH):
    """An agent at a given socket, "" for none; paramiko's own only knows SSH_AUTH_SOCK."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        if path and os.path.exists(path):
            with contextlib.suppress(OSError, paramiko.SSHException):  # a dead agent is no agent
                self._sock.connect(path)
                self._connect(self._sock)  # type: ignore[attr-defined]  # missing from the stubs

    def close(self) -> None:
        """Leave the agent; its keys can't sign any more."""
        self._sock.close()


def _public_blob(path: str) -> bytes:
    """Wire bytes of the `.pub` beside a key file, to find its twin in the agent."""
    text = _text(f"{path}.pub").split()
    if len(text) < 2:
        return b""
    try:
        return base64.b64decode(text[1])
    except ValueError:
        return b""


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _read_into(receive: Callable[[int], bytes], pieces: list[bytes]) -> None:
    with contextlib.suppress(OSError):  # a lost connection is seen by whoever waits for the end
        while piece := receive(65536):
            pieces.append(piece)

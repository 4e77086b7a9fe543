"""From a name to a route: which hops to take, as whom, with which keys; ~/.ssh/config is honoured.

Honoured: Host and Match patterns, HostName, User, Port, IdentityFile, CertificateFile (the first of several),
IdentitiesOnly, IdentityAgent, ProxyJump over any number of hops, ProxyCommand, ConnectTimeout,
ServerAliveInterval, UserKnownHostsFile, GlobalKnownHostsFile, HostKeyAlias, StrictHostKeyChecking; a
certificate beside its key is used. The inventory's own values win over the file's. ForwardAgent is not: no
device gets at the user's agent.
"""

from __future__ import annotations

import getpass
import os
from dataclasses import dataclass, replace
from pathlib import Path

import paramiko

from starsd_deploy.inventory import Device
from starsd_edge.errors import ConfigError

__all__ = ["Hop", "Route", "SshFiles", "load_ssh_files", "route_to"]

CONNECT_TIMEOUT_S = 15.0  # a board on Wi-Fi answers within two; hops without a timeout have hung for minutes
KEEPALIVE_S = 10  # a lost connection is noticed soon after, also by who waits for a long command
MAX_HOPS = 8  # a ProxyJump loop ends here


@dataclass(frozen=True, slots=True)
class Hop:
    """One server to log in to.

    alias          the name that messages use: the device's, or the jump host's as it was written
    host_key_name  the name in known_hosts: `host`, unless HostKeyAlias says otherwise
    identities     key files to try, in order; agent_socket "" means no agent
    certificate    a file with a certificate of one of the keys, "" for none but those beside their keys
    known_hosts    files to look in, the first is appended to
    accept_new     whether an unknown key is recorded on first use; a changed one never is
    host_key_pin   fingerprint that the server must have, instead of known_hosts
    """

    alias: str
    host: str
    port: int
    user: str
    identities: tuple[str, ...]
    identities_only: bool
    agent_socket: str
    known_hosts: tuple[str, ...]
    host_key_name: str
    accept_new: bool = True
    host_key_pin: str = ""
    timeout_s: float = CONNECT_TIMEOUT_S
    keepalive_s: int = KEEPALIVE_S
    proxy_command: str = ""
    certificate: str = ""


@dataclass(frozen=True, slots=True)
class Route:
    """Hops in the order they are opened; the last is the device."""

    hops: tuple[Hop, ...]

    @property
    def device(self) -> Hop:
        """Where the route ends."""
        return self.hops[-1]


@dataclass(frozen=True, slots=True)
class SshFiles:
    """The user's ssh set-up: parsed config, home folder, agent socket."""

    config: paramiko.SSHConfig
    home: Path
    agent_socket: str


def load_ssh_files(config_path: Path | None = None) -> SshFiles:
    """Read ~/.ssh/config (or the file given); a missing one is an empty one.

    Raises:
        ConfigError: it cannot be read or parsed.
    """
    home = Path.home()
    path = config_path or home / ".ssh" / "config"
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        config = paramiko.SSHConfig.from_text(text)
    except (OSError, UnicodeDecodeError, paramiko.ConfigParseError) as error:
        raise ConfigError(f"{path}: {error}") from error
    return SshFiles(config=config, home=home, agent_socket=os.environ.get("SSH_AUTH_SOCK", ""))


def route_to(device: Device, files: SshFiles) -> Route:
    """The hops to a device.

    Raises:
        ConfigError: an ssh option has a value that makes no sense, or jumps form a loop.
    """
    last = _hop(device.host, files)
    last = replace(
        last,
        alias=device.name,
        user=device.user or last.user,
        port=device.port or last.port,
        identities=((device.identity_file,) if device.identity_file else ()) + last.identities,
        host_key_pin=device.host_key,
    )
    jump = device.jump or str(files.config.lookup(device.host).get("proxyjump", ""))
    return Route(hops=(*_jumps(jump, files, 0), last))


def _jumps(jump: str, files: SshFiles, depth: int) -> tuple[Hop, ...]:
    """`a,user@b:2222` -> hops; a hop's own ProxyJump comes before the first one only, as ssh does it."""
    if not jump or jump.lower() == "none":
        return ()
    if depth > MAX_HOPS:
        raise ConfigError(f"ssh ProxyJump: more than {MAX_HOPS} hops by way of {jump!r}; is it a loop?")
    hops: list[Hop] = []
    for index, spec in enumerate(part.strip() for part in jump.split(",")):
        user, _, rest = spec.removeprefix("ssh://").rpartition("@")
        name, port = _split_port(rest)
        hop = _hop(name, files)
        hop = replace(hop, user=user or hop.user, port=port or hop.port)
        if index == 0:
            hops.extend(_jumps(str(files.config.lookup(name).get("proxyjump", "")), files, depth + 1))
        hops.append(hop)
    return tuple(hops)


def _split_port(text: str) -> tuple[str, int]:
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        return host, int(rest[1:]) if rest[1:].isdigit() else 0
    host, _, port = text.rpartition(":")
    if host and ":" not in host and port.isdigit():
        return host, int(port)
    return text, 0


def _hop(name: str, files: SshFiles) -> Hop:
    options = files.config.lookup(name)
    host = str(options.get("hostname", name))
    strict = str(options.get("stricthostkeychecking", "accept-new")).lower()
    known = f"{options.get('userknownhostsfile', '')}".split() or [str(files.home / ".ssh" / "known_hosts")]
    known += f"{options.get('globalknownhostsfile', '/etc/ssh/ssh_known_hosts')}".split()
    return Hop(
        alias=name,
        host=host,
        port=_number(options.get("port", 22), name, "Port"),
        user=str(options.get("user", getpass.getuser())),
        identities=_identities(options.get("identityfile", []), files.home),
        identities_only=str(options.get("identitiesonly", "no")).lower() == "yes",
        agent_socket=_agent(str(options.get("identityagent", "")), files),
        known_hosts=tuple(str(Path(path).expanduser()) for path in known),
        host_key_name=str(options.get("hostkeyalias", host)),
        accept_new=strict not in {"yes", "ask"},
        timeout_s=float(
            _number(options.get("connecttimeout", int(CONNECT_TIMEOUT_S)), name, "ConnectTimeout")
        ),
        keepalive_s=_number(options.get("serveraliveinterval", 0), name, "ServerAliveInterval")
        or KEEPALIVE_S,
        certificate=_certificate(str(options.get("certificatefile", "")), host, files),
        proxy_command="" if options.get("proxycommand") in (None, "none") else str(options["proxycommand"]),
    )


def _identities(configured: object, home: Path) -> tuple[str, ...]:
    if isinstance(configured, list) and configured:
        return tuple(str(Path(str(path)).expanduser()) for path in configured)
    defaults = ("id_ed25519", "id_ecdsa", "id_rsa")
    return tuple(str(home / ".ssh" / name) for name in defaults if (home / ".ssh" / name).exists())


def _certificate(configured: str, host: str, files: SshFiles) -> str:
    if configured.lower() in ("", "none"):
        return ""
    for token, value in (("%d", str(files.home)), ("%h", host), ("%u", getpass.getuser()), ("%%", "%")):
        configured = configured.replace(token, value)
    return str(Path(configured).expanduser())


def _agent(configured: str, files: SshFiles) -> str:
    if configured.lower() == "none":
        return ""
    if not configured or configured == "SSH_AUTH_SOCK":
        return files.agent_socket
    return os.path.expandvars(str(Path(configured).expanduser()))


def _number(value: object, name: str, option: str) -> int:
    try:
        return int(str(value))
    except ValueError:
        raise ConfigError(f"ssh config: {option} of {name} is {value!r}, not a number") from None

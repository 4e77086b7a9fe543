"""Why there is no connection, in words. ZeroMQ tells that something failed, and not what."""

from __future__ import annotations

import errno
import socket

import zmq

__all__ = ["FULL_STATUS", "handshake_trouble", "wants_keys", "why_unreachable"]

FULL_STATUS = 500  # in ZAP's answer (ZeroMQ RFC 27), for a device that is known and has too many connections
TCP_PATIENCE_S = 1.0
# ZMTP 3 (ZeroMQ RFC 23): both sides begin with a signature, a version, the name of a security mechanism,
# and more that is of no use here. Whoever has heard signature and major version tells all of its own.
SIGNATURE_AND_VERSION = b"\xff" + bytes(8) + b"\x7f" + b"\x03"
MECHANISM = slice(12, 32)


def wants_keys(address: str) -> bool:
    """Whether what listens at `address` is encrypted; False where nothing does. Blocks up to TCP_PATIENCE_S.

    Only its greeting is read: nobody is let in or refused for that.
    """
    transport, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    if transport != "tcp":
        return False
    heard = b""
    try:
        with socket.create_connection((host.strip("[]"), int(port)), TCP_PATIENCE_S) as connection:
            connection.sendall(SIGNATURE_AND_VERSION)
            while len(heard) < MECHANISM.stop and (more := connection.recv(MECHANISM.stop - len(heard))):
                heard += more
    except (OSError, ValueError):
        return False
    return heard[MECHANISM].rstrip(b"\0") == b"CURVE"


def why_unreachable(address: str) -> str:
    """Try a TCP connection to `address` and say what became of it. Blocks for at most TCP_PATIENCE_S."""
    transport, _, rest = address.partition("://")
    if transport != "tcp":
        return f"nothing listens at {address}: is the draft service running?"
    host, _, port = rest.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), TCP_PATIENCE_S).close()
    except ValueError:
        return f"{address} is no address: tcp://HOST:PORT"
    except socket.gaierror:
        return f"the name '{host}' is not known to this network"
    except ConnectionRefusedError:
        return f"nothing listens at {address}: is the draft service running there?"
    except TimeoutError:
        return f"no answer from {address}: switched off, another address, or a firewall between"
    except OSError as error:
        if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN):
            return f"no route to {host}: is this device in the same network?"
        return f"{address}: {error.strerror}"
    return f"{address} takes connections, and does not answer like a draft service"


def handshake_trouble(event: int, status: int, address: str, fingerprint: str | None) -> str:
    """What a failed security handshake most likely means, and what to do. `status` is the monitor's value."""
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH and status == FULL_STATUS:
        return (
            f"the draft service at {address} takes no more connections of this device: it has as many as it "
            f"may; end programs that hold them"
        )
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return (
            f"the draft service at {address} does not know this device's key {fingerprint or '(none)'}: "
            f"`starsd keys trust` it there"
        )
    if fingerprint is None:
        return f"{address} is no draft service, or one that wants keys: give this device a key"
    return (
        f"{address} does not hold the draft service's key that this device knows: another service, "
        f"or it has a new key"
    )

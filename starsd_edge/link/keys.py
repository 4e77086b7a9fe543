"""CURVE key pairs in files: made on the machine that uses them, readable by their owner alone.

A secret key never travels. What travels is the public half, and a person compares its fingerprint.
"""

from __future__ import annotations

import base64
import datetime
import errno
import hashlib
import json
import os
import re
import shlex
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from starsd_edge.config import config_dir, named_folder
from starsd_edge.errors import AuthenticationError, ConfigError, ResourceError
from starsd_edge.whole_file import write_whole

__all__ = [
    "KeyPair",
    "PublicKey",
    "key_dir",
    "make_folder",
    "parse_public",
    "read_public_record",
    "unreadable",
    "write_private",
    "write_public",
]

SECRET_MODE = 0o600
PUBLIC_MODE = 0o644
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
Z85_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
# 80 bits of sha256: 16 letters that people can read to each other, and nobody can find a second key for.
FINGERPRINT_BYTES = 10
MAX_KEY_FILE_BYTES = 4096
# What fails with one of these says something about this process, and nothing about the file.
SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def key_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Where this user's keys live unless a command is told otherwise. Not created here.

    device.key       this machine's pair, and device.pub its public half: 40 characters
    trusted/*.pub    whom a service here lets in
    services/*.pub   the public keys of services this device uses
    """
    if environ.get("STARSD_KEYS"):
        return named_folder(environ, "STARSD_KEYS")
    return config_dir(environ) / "keys"


@dataclass(frozen=True, slots=True)
class PublicKey:
    """A machine's public key and what it is called.

    name      of the device or service
    public    40 characters of Z85
    created   ISO 8601, UTC
    previous  an older key that is still good while a rotation is under way, or ""
    """

    name: str
    public: str
    created: str
    previous: str = ""

    def __post_init__(self) -> None:
        check_name(self.name)
        parse_public(self.public)
        if self.previous:
            parse_public(self.previous)

    @property
    def fingerprint(self) -> str:
        """Four groups of four letters, for people: `QK7M-2XVA-...`."""
        return fingerprint(self.public)


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A public key and its secret. `repr` does not show the secret."""

    key: PublicKey
    secret: str = field(repr=False)

    @classmethod
    def generate(cls, name: str) -> KeyPair:
        """A fresh pair. Its public key does not start like an option: it will be a command's argument."""
        public, secret = zmq.curve_keypair()
        while public.startswith(b"-"):
            public, secret = zmq.curve_keypair()
        return cls(PublicKey(name, public.decode(), now_iso()), secret.decode())

    @classmethod
    def load(cls, path: Path, *, others_may_read: bool = False) -> KeyPair:
        """Raises ConfigError: missing or damaged; AuthenticationError: others may read it, unless
        `others_may_read`, which is for putting it out of use."""
        try:
            mode = stat.S_IMODE(path.stat().st_mode)
        except FileNotFoundError:
            raise ConfigError(
                f"{path}: no key is there; make one with `{command_for('generate', path)}`"
            ) from None
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
        if mode & 0o077 and not others_may_read:
            raise AuthenticationError(
                f"{path}: others may read this secret key (mode {mode:04o}); if nobody did, `chmod 600` it, "
                f"otherwise `{command_for('rotate', path)}`"
            )
        record = read_record(path)
        secret = record.get("secret")
        if not isinstance(secret, str) or not Z85_KEY.fullmatch(secret):
            raise ConfigError(f"{path}: no secret key is in it")
        key = public_of(record, path)
        if zmq.curve_public(secret.encode()).decode() != key.public:
            raise ConfigError(f"{path}: public and secret key do not belong together")
        return cls(key, secret)

    def save(self, path: Path, *, replace: bool = False) -> None:
        """Write it where only its owner can read it, and its public half beside it as `*.pub`.

        Raises ConfigError when a key is there already.
        """
        record = {**record_of(self.key), "secret": self.secret}
        write_private(path, json.dumps(record, indent=2) + "\n", replace=replace)
        write_atomic(path.with_suffix(".pub"), self.key.public + "\n", PUBLIC_MODE)


def fingerprint(public: str) -> str:
    digest = hashlib.sha256(z85.decode(public.encode())).digest()[:FINGERPRINT_BYTES]
    letters = base64.b32encode(digest).decode()
    return "-".join(letters[i : i + 4] for i in range(0, len(letters), 4))


def parse_public(text: str) -> str:
    """`text` as a Z85 public key. Raises ConfigError when it is none."""
    key = text.strip()
    if not Z85_KEY.fullmatch(key):
        raise ConfigError("a public key is 40 characters of Z85, as `starsd keys show --public` prints it")
    try:
        raw = z85.decode(key.encode())
    except (ValueError, OverflowError, struct.error) as error:
        raise ConfigError(f"not a public key: {error}") from None
    if not any(raw):
        raise ConfigError("the key of zeros is nobody's")
    return key


def check_name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} is no name for a key: letters, digits, '.', '_', '-', at most 63 of them"
        )
    return name


def record_of(key: PublicKey) -> dict[str, str]:
    record = {"name": key.name, "public": key.public, "created": key.created}
    return {**record, "previous": key.previous} if key.previous else record


def public_of(record: dict[str, object], path: Path) -> PublicKey:
    values = [record.get(name, "") for name in ("name", "public", "created", "previous")]
    if not all(isinstance(value, str) for value in values):
        raise ConfigError(f"{path}: name, public, created and previous are texts")
    try:
        return PublicKey(*[str(value) for value in values])
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def read_record(path: Path) -> dict[str, object]:
    """The JSON object in a key file. Raises ConfigError."""
    try:
        record = json.loads(read_key_file(path))
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise ConfigError(f"{path}: not a key file")
    return record


def read_public_record(path: Path) -> PublicKey:
    """Whom a file in a trusted folder is for: a record, or a device's `.pub` file copied there, which is
    for the device that the file is named after. Raises what `read_key_file` does."""
    try:
        public = parse_public(read_key_file(path).decode("ascii", errors="replace"))
    except ConfigError:
        return public_of(read_record(path), path)
    return PublicKey(path.stem, public, "")


def read_key_file(path: Path) -> bytes:
    """Raises ConfigError where it is none, by its kind or size; ResourceError where this process has no
    descriptor or memory left to read it."""
    try:
        # Anything else than a file, a pipe above all, may keep its reader waiting for ever.
        if not stat.S_ISREG(path.stat().st_mode):
            raise ConfigError(f"{path}: not a key file")
        with path.open("rb") as file:
            data = file.read(MAX_KEY_FILE_BYTES + 1)
    except OSError as error:
        raise unreadable(path, error) from None
    if len(data) > MAX_KEY_FILE_BYTES:
        raise ConfigError(f"{path}: not a key file")
    return data


def unreadable(path: Path, error: OSError) -> ConfigError | ResourceError:
    """What to raise for a key file or a folder of them."""
    kind = ResourceError if error.errno in SHORTAGES else ConfigError
    return kind(f"{path}: {error.strerror}")


def command_for(verb: str, path: Path) -> str:
    """The `starsd keys` command that does something to the key in `path`."""
    name = "" if path.stem == "device" else f" --name {path.stem}"
    folder = "" if path.parent == key_dir() else f" --dir {shlex.quote(str(path.parent))}"
    return f"starsd keys {verb}{name}{folder}"


def write_public(path: Path, key: PublicKey) -> None:
    """Write or replace a public record in one step."""
    write_atomic(path, json.dumps(record_of(key), indent=2) + "\n", PUBLIC_MODE)


def write_private(path: Path, text: str, *, replace: bool) -> None:
    if os.path.exists(path) and not replace:
        raise ConfigError(f"{path}: a key is there already; `{command_for('rotate', path)}` makes a new one")
    make_folder(path.parent, 0o700)
    write_atomic(path, text, SECRET_MODE)


def make_folder(path: Path, mode: int) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True, mode=mode)
    except OSError as error:
        raise ConfigError(f"{path}: this folder cannot be made: {error.strerror}") from None


def write_atomic(path: Path, text: str, mode: int) -> None:
    """All of it or nothing, on disk before it has its name; never readable by more than `mode` allows."""
    try:
        write_whole(path, text, mode)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None


def now_iso() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")

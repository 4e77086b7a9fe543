"""`starsd keys`: make a device's key, and say whom a service lets in."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import click

from starsd_edge.errors import ConfigError
from starsd_edge.link.address import draft_address
from starsd_edge.link.keys import (
    MAX_KEY_FILE_BYTES,
    KeyPair,
    PublicKey,
    check_name,
    key_dir,
    now_iso,
    parse_public,
    record_of,
)
from starsd_edge.link.pins import Pin, pin_service, pinned_services, unpin_service
from starsd_edge.link.trust import TrustStore

FOLDER = click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="Keys folder.  [default: $STARSD_KEYS, or keys/ in the configuration folder]",
)
TRUSTED = "trusted"
NAME = click.option("--name", default="device", show_default=True, help="Which key: NAME.key in the folder.")
AS_JSON = click.option("--json", "as_json", is_flag=True, help="For a script.")


@click.group(name="keys")
def command() -> None:
    """Make a device's key, and say whom a service lets in.

    Secret keys are made where they are used and stay there. Public ones are compared by fingerprint.
    """


@command.command()
@FOLDER
@NAME
@AS_JSON
def generate(folder: Path | None, name: str, *, as_json: bool) -> None:
    """Make this machine's key pair, unless it has one."""
    path = key_path(folder, name)
    if os.path.exists(path):
        tell(KeyPair.load(path).key, as_json=as_json, note=f"kept the key in {path}")
        return
    pair = KeyPair.generate(name)
    pair.save(path)
    tell(pair.key, as_json=as_json, note=f"made a key in {path}")


@command.command()
@FOLDER
@NAME
@AS_JSON
@click.option("--public", "only_public", is_flag=True, help="The public key alone.")
def show(folder: Path | None, name: str, *, as_json: bool, only_public: bool) -> None:
    """This machine's public key and its fingerprint."""
    key = KeyPair.load(key_path(folder, name)).key
    if only_public:
        click.echo(key.public)
    else:
        tell(key, as_json=as_json)


@command.command(short_help="Make a new key in place of the old one, which is kept.")
@FOLDER
@NAME
@AS_JSON
def rotate(folder: Path | None, name: str, *, as_json: bool) -> None:
    """Make a new key in place of the old one, which stays beside it as NAME.old.key.

    The services must trust the new key before this device gets in again: `keys trust NAME KEY --replace`,
    with --keep-previous if the old one is still in use. A service's own key (--name service) is in use from
    its next start on, and every device has to `keys pin` it.
    """
    path = key_path(folder, name)
    old = KeyPair.load(path, others_may_read=True)
    old.save(path.with_name(f"{name}.old.key"), replace=True)
    pair = KeyPair.generate(old.key.name)
    pair.save(path, replace=True)
    tell(pair.key, as_json=as_json, note=f"made a new key in {path}; the old one is in {name}.old.key")


@command.command()
@FOLDER
@click.argument("name")
@click.argument("public_key", metavar="KEY")
@click.option("--replace", is_flag=True, help="NAME may have another key already.")
@click.option("--keep-previous", is_flag=True, help="With --replace: the other key stays good too.")
def trust(folder: Path | None, name: str, public_key: str, *, replace: bool, keep_previous: bool) -> None:
    """Let the device that holds KEY in, as NAME. KEY is its 40 characters, or a file with them."""
    key = PublicKey(name, read_public(public_key), now_iso())
    trusted(folder).trust(key, replace_other=replace, keep_previous=keep_previous)
    click.echo(f"{name} is let in: {key.fingerprint}")


@command.command()
@FOLDER
@click.argument("name")
def revoke(folder: Path | None, name: str) -> None:
    """Let NAME (or a fingerprint) in no more. A running service ends its connections within a second."""
    key = trusted(folder).revoke(name)
    click.echo(f"{key.name} is let in no more: {key.fingerprint}")


@command.command(name="list")
@FOLDER
@AS_JSON
def list_trusted(folder: Path | None, *, as_json: bool) -> None:
    """Whom a service here lets in."""
    keys = trusted(folder).devices()
    if as_json:
        click.echo(json.dumps([{**record_of(key), "fingerprint": key.fingerprint} for key in keys]))
        return
    width = max((len(key.name) for key in keys), default=0)
    for key in keys:
        note = "  (and its previous key)" if key.previous else ""
        click.echo(f"{key.name:<{width}}  {key.fingerprint}  since {key.created}{note}")
    if not keys:
        click.echo("nobody is let in yet: `starsd keys trust NAME KEY`")


@command.command(short_help="Remember KEY as that of the draft service NAME.")
@FOLDER
@click.argument("name")
@click.argument("public_key", metavar="KEY")
@click.option("--address", default="", help="The address it is for, where there are several services.")
def pin(folder: Path | None, name: str, public_key: str, address: str) -> None:
    """Remember KEY as that of the draft service NAME: this device talks to no other."""
    public = read_public(public_key)
    if address:
        draft_address(address)
    pin_service(folder or key_dir(), Pin(name, public, address))
    click.echo(f"{name} is known by {PublicKey(name, public, '').fingerprint}")


@command.command()
@FOLDER
@click.argument("name")
def unpin(folder: Path | None, name: str) -> None:
    """Forget the key of the draft service NAME."""
    unpin_service(folder or key_dir(), name)
    click.echo(f"{name} is forgotten")


@command.command()
@FOLDER
@AS_JSON
def pins(folder: Path | None, *, as_json: bool) -> None:
    """Which draft services this device knows."""
    known = pinned_services(folder or key_dir())
    rows = [(pin, PublicKey(pin.name, pin.public, "").fingerprint) for pin in known]
    if as_json:
        click.echo(json.dumps([{**asdict(pin), "fingerprint": fingerprint} for pin, fingerprint in rows]))
        return
    width = max((len(pin.name) for pin in known), default=0)
    for pin, fingerprint in rows:
        click.echo(f"{pin.name:<{width}}  {fingerprint}  {pin.address or 'at any address'}")
    if not rows:
        click.echo("no service is known yet: `starsd keys pin NAME KEY`")


def key_path(folder: Path | None, name: str) -> Path:
    return (folder or key_dir()) / f"{check_name(name)}.key"


def trusted(folder: Path | None) -> TrustStore:
    """Beneath the keys folder, where the service looks; a script may name that very folder, too."""
    folder = folder or key_dir()
    return TrustStore(folder if folder.name == TRUSTED else folder / TRUSTED)


def read_public(text: str) -> str:
    """A key as it is, or the first word of the file it names."""
    try:
        return parse_public(text)
    except ConfigError:
        if not os.path.isfile(text):
            raise
    try:
        with open(text, encoding="utf-8", errors="replace") as file:
            words = file.read(MAX_KEY_FILE_BYTES).split()
        return parse_public(words[0] if words else "")
    except OSError as error:
        raise ConfigError(f"{text}: cannot be read: {error.strerror}") from None
    except ConfigError as error:
        raise ConfigError(f"{text}: {error}") from None


def tell(key: PublicKey, *, as_json: bool, note: str = "") -> None:
    if as_json:
        click.echo(json.dumps({**record_of(key), "fingerprint": key.fingerprint}))
        return
    if note:
        click.echo(note)
    click.echo(f"public key   {key.public}")
    click.echo(f"fingerprint  {key.fingerprint}")

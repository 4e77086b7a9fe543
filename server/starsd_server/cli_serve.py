"""`starsd draft serve`."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from pathlib import Path

import click

from starsd_edge.cli.drafts import software
from starsd_edge.defaults import DRAFT_PORT
from starsd_edge.errors import BundleError
from starsd_edge.link.address import MONITOR_PORT, bind_address
from starsd_edge.link.keys import KeyPair, key_dir
from starsd_edge.link.pins import SERVICE_KEY
from starsd_edge.link.sockets import check_private, is_local
from starsd_server.config import HeadSource, ServiceConfig
from starsd_server.scheduling import Limits, Policy
from starsd_server.service import Service

__all__ = ["command"]

DEFAULTS = Limits()
AT_LEAST_ONE = click.IntRange(1)
CHECK_BIND = "tcp://127.0.0.1:0"


@click.command("serve")
@click.option(
    "--head",
    "heads",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A draft head's folder; may be given several times. Without it: the embedded model's head.",
)
@click.option(
    "--target",
    "targets",
    multiple=True,
    type=click.Path(path_type=Path),
    help="The target of the head at the same place (bundle, GGUF file or Hugging Face folder); needed once.",
)
@click.option(
    "--bind", default=f"tcp://127.0.0.1:{DRAFT_PORT}", show_default=True, help="Endpoint; port 0: any free."
)
@click.option(
    "--monitor",
    help="Endpoint that `starsd monitor` watches; by default the port after --bind's; 'none': no.",
)
@click.option(
    "--keys",
    type=click.Path(path_type=Path),
    help="Keys folder. Off this machine keys are needed: without this option, those of the usual folder.",
)
@click.option("--name", default="starsd", show_default=True, help="The service's name.")
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
@click.option(
    "--precision",
    type=click.Choice(["auto", "int8", "float32", "float16", "bfloat16"]),
    default="auto",
    show_default=True,
    help="How the head's matrices are held.",
)
@click.option(
    "--threads", default=1, show_default=True, type=click.IntRange(1), help="CPU threads of the head."
)
@click.option(
    "--scheduler",
    type=click.Choice([policy.value for policy in Policy]),
    default=Policy.BATCHED.value,
    show_default=True,
    help="Baselines: whole, trees as asked for however busy the engine is; serial, one after the other.",
)
@click.option(
    "--draft-ahead",
    type=click.Choice(["auto", "on", "off"]),
    default="auto",
    show_default=True,
    help="While a tree is verified and nobody waits, draft for its likely outcomes; auto: not on a CPU.",
)
@click.option(
    "--max-sessions",
    default=DEFAULTS.max_sessions,
    show_default=True,
    type=click.IntRange(1),
    help="Sessions that hold KV at once; those in excess take turns.",
)
@click.option(
    "--device-sessions",
    default=DEFAULTS.device_sessions,
    show_default=True,
    type=click.IntRange(1),
    help="Sessions that one device may open.",
)
@click.option(
    "--max-len",
    default=2048,
    show_default=True,
    type=click.IntRange(16),
    help="Tokens of a session, as far as its head was trained on so many.",
)
@click.option(
    "--kv-mib",
    default=0,
    type=click.IntRange(0),
    help="Memory for all sessions' KV; refuses to start where they would take more. 0: no bound.",
)
@click.option("--json-status", is_flag=True, help="Print the ready line as JSON.")
@click.option("--until-eof", is_flag=True, help="Stop when standard input ends, as it does with a parent.")
@click.option("--check", is_flag=True, help="Only see that it could serve: load heads and keys, bind, leave.")
def command(
    heads: tuple[Path, ...],
    targets: tuple[Path, ...],
    bind: str,
    monitor: str | None,
    keys: Path | None,
    name: str,
    device: str,
    precision: str,
    threads: int,
    scheduler: str,
    draft_ahead: str,
    max_sessions: int,
    device_sessions: int,
    max_len: int,
    kv_mib: int,
    json_status: bool,
    until_eof: bool,
    check: bool,
) -> None:
    """Draft for many edges. Prints one line when it serves; SIGTERM lets rounds under way finish."""
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S"
    )
    bind = bind_address(bind)
    watched = monitor_endpoint(bind, monitor)
    if keys is None and not (is_local(bind) and is_local(watched or bind)):
        keys = key_dir()
    sources = head_sources(heads, targets)
    check_inputs(bind, sources, keys)
    config = ServiceConfig(
        heads=sources,
        # beside a service that has the port already, a check takes another one
        bind=CHECK_BIND if check else bind,
        folder="",
        monitor="" if check else watched,
        keys=str(keys) if keys else "",
        name=name,
        software=software(),
        device=device,
        precision=precision,
        threads=threads,
        scheduler=scheduler,
        draft_ahead=draft_ahead,
        limits=Limits(max_sessions=max_sessions, device_sessions=device_sessions),
        max_len=max_len,
        kv_mib=kv_mib,
    )
    service = Service(config)
    service.heed_signals()
    try:
        if until_eof:
            threading.Thread(target=stop_at_end_of_input, args=(service,), daemon=True).start()
        if sys.stderr.isatty():  # a start takes seconds, the first one many
            what = "the draft head" if len(sources) == 1 else f"{len(sources)} draft heads"
            click.echo(f"starsd: loading {what} ...", err=True)
        ready = service.start()
        if check:
            click.echo("starsd: heads load, the service could serve")
            return
        if json_status:
            status = {
                "event": "ready",
                "address": ready.address,
                "monitor": ready.monitor,
                "pids": service.pids,
            }
            print(json.dumps(status), flush=True)  # noqa: T201  # what programs wait for
        else:
            beside = f", monitor at {ready.monitor}" if ready.monitor else ""
            click.echo(f"starsd: drafting at {ready.address}{beside}")
        service.run()
    finally:
        service.close()


def stop_at_end_of_input(service: Service) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    service.stop()


def head_sources(heads: tuple[Path, ...], targets: tuple[Path, ...]) -> tuple[HeadSource, ...]:
    """Heads and their targets, in pairs. Raises UsageError when there are more targets than heads."""
    if not heads:
        from starsd_server.heads.checkpoint import EMBEDDED_HEAD

        heads = (EMBEDDED_HEAD,)
    if len(targets) > len(heads):
        raise click.UsageError(f"{len(targets)} targets for {len(heads)} heads")
    padded = [*map(str, targets), *[""] * (len(heads) - len(targets))]
    return tuple(HeadSource(str(head), target) for head, target in zip(heads, padded, strict=True))


def check_inputs(bind: str, heads: tuple[HeadSource, ...], keys: Path | None) -> None:
    """What can be told before heads are loaded, which takes long. Raises BundleError or ConfigError."""
    for head in heads:
        for path, kind in ((head.folder, "draft head"), (head.target, "target")):
            if path and not os.path.exists(path):
                raise BundleError(f"{path}: not a {kind}, nothing is there")
    if keys is not None:
        KeyPair.load(keys / SERVICE_KEY)
    check_private(bind, has_key=keys is not None)


def monitor_endpoint(bind: str, monitor: str | None) -> str:
    """What the user named, else the port after the bind's; "" for none, and when any free port is bound."""
    if monitor is not None:
        return "" if monitor == "none" else bind_address(monitor, MONITOR_PORT)
    host, _, port = bind.rpartition(":")
    if not bind.startswith("tcp://") or not port.isdigit() or int(port) in (0, 65535):
        return ""
    return f"{host}:{int(port) + 1}"

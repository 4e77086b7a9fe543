"""Stand-ins for what a device installs: a wheel with a `starsd_edge` that serves, checks and makes keys.

The real wheel, model and link are tried in the device lab; here the deployer is what is tested, so the
program it deploys answers the same command lines and does as little as possible behind them.
"""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Callable
from pathlib import Path

from starsd_deploy.blobs import Blob, hash_file
from starsd_deploy.commands import ServiceLink, bundle_link
from starsd_deploy.contents import HashCache, read_content
from starsd_deploy.facts import Facts
from starsd_deploy.inventory import Device
from starsd_deploy.plan import Wanted
from starsd_deploy.releases import make_release
from starsd_deploy.steps import WheelFile
from starsd_deploy.wheels import DeviceEnvironment, WheelSet

PROGRAM = """\
import hashlib, http.server, os, secrets, signal, socket, string, sys, time
args = sys.argv[1:]
BEHAVIOUR = {behaviour!r}

def option(name):
    return args[args.index(name) + 1]

if args[:2] == ["bundle", "verify"]:
    if BEHAVIOUR == "gate fails":
        sys.exit("starsd: bundle: self-test: expected token 7, got 9")
elif args[:2] == ["bundle", "engine"]:
    cache = os.environ["STARSD_CACHE"]
    os.makedirs(os.path.join(cache, "engines"), exist_ok=True)
    path = os.path.join(cache, "engines", "toy.engine")
    if BEHAVIOUR == "engine fails":
        sys.exit("starsd: bundle: TensorRT cannot build it: not enough GPU memory")
    while BEHAVIOUR == "engine takes its time" and not os.path.exists(os.path.join(cache, "go")):
        time.sleep(0.02)
    if not os.path.exists(path):
        with open(os.path.join(cache, "builds"), "a") as file:
            file.write("built\\n")
        with open(path, "wb") as file:
            file.write(os.urandom(100_000))
    print(path)
elif args[0] == "ping":
    pass
elif args[:2] == ["keys", "generate"]:
    path = os.path.join(option("--dir"), option("--name") + ".key")
    if not os.path.exists(path):
        with open(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
            file.write("".join(secrets.choice(string.ascii_letters) for _ in range(40)))
elif args[:2] == ["keys", "rotate"]:
    path = os.path.join(option("--dir"), option("--name") + ".key")
    os.unlink(path)
    with open(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
        file.write("".join(secrets.choice(string.ascii_letters) for _ in range(40)))
elif args[:2] == ["keys", "show"]:
    secret = open(os.path.join(option("--dir"), option("--name") + ".key"), "rb").read()
    print(hashlib.sha256(secret).hexdigest()[:40])
elif args[:2] == ["keys", "trust"]:
    os.makedirs(option("--dir"), exist_ok=True)
    open(os.path.join(option("--dir"), args[2] + ".pub"), "w").write('{{"public": "%s"}}' % args[3])
elif args[:2] == ["keys", "revoke"]:
    os.unlink(os.path.join(option("--dir"), args[2] + ".pub"))
elif args[:2] == ["draft", "serve"] and "--check" in args:
    if BEHAVIOUR == "gate fails":
        sys.exit("starsd: head: no such file")
elif args[:2] == ["draft", "serve"]:
    server = socket.create_server(("127.0.0.1", int(option("--bind").rpartition(":")[2])))
    while True:
        server.accept()[0].close()
elif args[0] == "serve":
    if BEHAVIOUR == "start fails":
        sys.exit("starsd: endpoint: the sky is falling")
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write({version!r}.encode())
        def log_message(self, *words):
            pass
    if BEHAVIOUR == "answers for ever":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if BEHAVIOUR == "answers for a moment":
        def end_the_answer(number, frame):
            time.sleep(1)
            open(os.path.expanduser("~/answered"), "w").close()
            os._exit(0)
        signal.signal(signal.SIGTERM, end_the_answer)
    print("stand-in", {version!r}, "serves", file=sys.stderr, flush=True)
    class Server(http.server.HTTPServer):
        allow_reuse_address = True
    Server(("127.0.0.1", int(option("--port"))), Handler).serve_forever()
"""


def program_wheel(folder: Path, version: str, behaviour: str = "") -> Path:
    """A wheel of the stand-in program."""
    files = {
        "starsd_edge/__init__.py": "",
        "starsd_edge/__main__.py": PROGRAM.format(version=version, behaviour=behaviour),
    }
    return make_wheel(folder, "starsd_edge", version, files)


def make_wheel(
    folder: Path, name: str, version: str, files: dict[str, str], requires: tuple[str, ...] = ()
) -> Path:
    """Any small wheel, with a RECORD as installers expect it."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {line}\n" for line in requires)
    files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = [f"{member},sha256={_digest(text)},{len(text)}\n" for member, text in files.items()]
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in {**files, f"{info}/RECORD": "".join(rows) + f"{info}/RECORD,,\n"}.items():
            archive.writestr(zipfile.ZipInfo(member), text)
    return path


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")


def common_wheel(folder: Path) -> Path:
    """A wheel that every version has: it must be sent once."""
    return make_wheel(folder, "common", "1.0", {"common.py": "x = 1\n" * 1000})


def wheel_file(path: Path) -> WheelFile:
    """A wheel as the plan names it."""
    return WheelFile(path.name, Blob(sha256=hash_file(path), size=path.stat().st_size, source=str(path)))


def make_bundle(folder: Path, seed: str) -> Path:
    """A folder that passes for a bundle: a manifest and some data."""
    bundle = folder / f"bundle-{seed}"
    (bundle / "data").mkdir(parents=True, exist_ok=True)
    (bundle / "manifest.json").write_text(f'{{"seed": "{seed}"}}')
    (bundle / "data" / "weights.bin").write_bytes(hashlib.sha512(seed.encode()).digest() * 20_000)
    return bundle


def wanted_factory(
    folder: Path, version: str, *, behaviour: str = "", services: tuple[ServiceLink, ...] = ()
) -> Callable[[Device, Facts], Wanted]:
    """What a device shall be: the stand-in program of a version and its bundle."""
    work = folder / f"site-{version}-{behaviour.replace(' ', '-')}"
    work.mkdir(parents=True, exist_ok=True)
    wheel = program_wheel(work, version, behaviour)
    bundle = make_bundle(work, version)
    environment = DeviceEnvironment("3.11", "x86_64", (2, 36))
    wheels = WheelSet(environment, (wheel_file(common_wheel(work)), wheel_file(wheel)))

    def wanted(device: Device, facts: Facts) -> Wanted:
        contents = (
            (read_content(bundle_link(device), bundle, HashCache(work / "hashes.json")),)
            if device.bundle
            else ()
        )
        release = make_release(device, facts, version, wheels, contents, services)
        trusted_by = {service.name: "" for service in services if service.is_fleet_device}
        return Wanted(release=release, contents=contents, services=services, trusted_by=trusted_by)

    return wanted

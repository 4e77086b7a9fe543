"""Logging in: whom we trust, by which way, and what a refusal tells the user. All against a real sshd."""

from __future__ import annotations

import contextlib
import getpass
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import paramiko
import pytest

from starsd_deploy.known_hosts import HostKey, fingerprint
from starsd_deploy.runner import gather_facts
from starsd_deploy.ssh import connect
from starsd_deploy.ssh_config import KEEPALIVE_S, Route, SshFiles, load_ssh_files, route_to
from starsd_edge.errors import AuthenticationError, ConfigError, DeployError, UnreachableError
from tests.deploy.loopback import INTERNAL_SFTP, LoopbackDevice


def one_hop(board: LoopbackDevice, **changes: object) -> Route:
    return Route(hops=(board.hop(**changes),))


def host_key(board: LoopbackDevice) -> HostKey:
    key = paramiko.Ed25519Key.from_private_key_file(str(board.home / "host_ed25519"))
    return HostKey(key.get_name(), key.asbytes())


def test_scripts_run_with_both_streams_and_a_status(board: LoopbackDevice) -> None:
    with board.connect() as connection:
        done = connection.run("echo out; echo err >&2; exit 7")
    assert (done.status, done.stdout, done.stderr) == (7, "out\n", "err\n")


def test_output_beyond_both_windows_does_not_block(board: LoopbackDevice) -> None:
    script = "head -c 3000000 /dev/zero | tr '\\0' a >&2; head -c 3000000 /dev/zero | tr '\\0' b"
    with board.connect() as connection:
        done = connection.run(script)
    assert (len(done.stdout), len(done.stderr)) == (3000000, 3000000)


def test_new_host_key_is_appended_and_the_file_is_otherwise_untouched(board: LoopbackDevice) -> None:
    known = board.home / "known_hosts"
    before = "# mine\n@cert-authority *.example ssh-ed25519 AAAA\nnonsense"
    known.write_text(before)
    board.connect().close()
    after = known.read_text()
    assert after.startswith(before + "\n")
    assert after.removeprefix(before + "\n").split()[:2] == [f"[127.0.0.1]:{board.port}", "ssh-ed25519"]
    board.connect().close()
    assert known.read_text() == after


def test_changed_host_key_is_refused_with_the_command_to_accept_it(board: LoopbackDevice) -> None:
    other = (board.home / "id_ed25519.pub").read_text().split()[1]
    known = board.home / "known_hosts"
    known.write_text(f"[127.0.0.1]:{board.port} ssh-ed25519 {other}\n")
    with pytest.raises(AuthenticationError, match="reflashed board") as caught:
        board.connect()
    command = str(caught.value).split("accept it: ")[1]
    assert command == f"ssh-keygen -R '[127.0.0.1]:{board.port}' -f {known}"
    subprocess.run(command, shell=True, check=True, capture_output=True)
    board.connect().close()


def test_hashed_entries_as_ssh_keygen_writes_them_are_understood(board: LoopbackDevice) -> None:
    board.connect().close()
    known = board.home / "known_hosts"
    subprocess.run(["ssh-keygen", "-H", "-f", str(known)], check=True, capture_output=True)
    assert known.read_text().startswith("|1|")
    before = known.read_text()
    board.connect().close()
    assert known.read_text() == before


def test_revoked_host_key_is_refused(board: LoopbackDevice) -> None:
    key = (board.home / "host_ed25519.pub").read_text().split()[1]
    (board.home / "known_hosts").write_text(f"@revoked * ssh-ed25519 {key}\n")
    with pytest.raises(AuthenticationError, match="revoked"):
        board.connect()


def test_pinned_fingerprint_replaces_known_hosts(board: LoopbackDevice) -> None:
    connect(one_hop(board, host_key_pin=fingerprint(host_key(board)))).close()
    assert not (board.home / "known_hosts").exists()
    with pytest.raises(AuthenticationError, match="inventory pins SHA256:wrong"):
        connect(one_hop(board, host_key_pin="SHA256:wrong"))


def test_strict_checking_records_nothing(board: LoopbackDevice) -> None:
    with pytest.raises(AuthenticationError, match="unknown and StrictHostKeyChecking"):
        connect(one_hop(board, accept_new=False))
    assert not (board.home / "known_hosts").exists()


def test_fingerprint_is_the_one_ssh_keygen_prints(board: LoopbackDevice) -> None:
    command = ["ssh-keygen", "-lf", str(board.home / "host_ed25519.pub")]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert fingerprint(host_key(board)) == printed.split()[1]


def test_key_that_is_not_accepted_names_what_was_tried(board: LoopbackDevice) -> None:
    (board.home / "authorized_keys").write_text("")
    with pytest.raises(AuthenticationError, match=r"tried .*id_ed25519.*ssh-copy-id"):
        board.connect()


def sign(board: LoopbackDevice, authority: Path, *words: str) -> None:
    """A certificate beside the user's key."""
    command = ["ssh-keygen", "-q", "-s", str(authority), "-I", "me", *words]
    subprocess.run([*command, str(board.home / "id_ed25519.pub")], check=True, capture_output=True)


def test_certificate_beside_the_key_logs_in(tmp_path: Path) -> None:
    """The device knows the authority and no key of ours."""
    authority = tmp_path / "authority"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(authority)], check=True)
    trusting = f"{INTERNAL_SFTP}\nTrustedUserCAKeys {authority}.pub"
    board = LoopbackDevice(tmp_path / "board", subsystem=trusting)
    try:
        (board.home / "authorized_keys").write_text("")
        with pytest.raises(AuthenticationError):
            board.connect()
        sign(board, authority, "-n", getpass.getuser())
        board.connect().close()
    finally:
        board.close()


@pytest.mark.parametrize("from_agent", [False, True], ids=["key file", "agent"])
def test_certificate_that_the_config_names_logs_in(from_agent: bool, tmp_path: Path) -> None:
    """It lies somewhere else than its key, which may be the agent's alone."""
    authority = tmp_path / "authority"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(authority)], check=True)
    trusting = f"{INTERNAL_SFTP}\nTrustedUserCAKeys {authority}.pub"
    board = LoopbackDevice(tmp_path / "board", subsystem=trusting)
    try:
        (board.home / "authorized_keys").write_text("")
        sign(board, authority, "-n", getpass.getuser())
        elsewhere = tmp_path / "mine.pub"
        (board.home / "id_ed25519-cert.pub").rename(elsewhere)
        with pytest.raises(AuthenticationError):
            connect(one_hop(board))
        if not from_agent:
            connect(one_hop(board, certificate=str(elsewhere))).close()
            return
        with running_agent(board) as agent_socket:
            (board.home / "id_ed25519").unlink()
            hop = {"identities": (), "identities_only": False, "agent_socket": str(agent_socket)}
            with pytest.raises(AuthenticationError):
                connect(one_hop(board, **hop))
            connect(one_hop(board, **hop, certificate=str(elsewhere))).close()
    finally:
        board.close()


@pytest.mark.parametrize("text", [None, "", "ssh-ed25519 AAAA", "no certificate at all"])
def test_certificate_that_is_none_is_named_and_the_key_tried(
    text: str | None, board: LoopbackDevice, tmp_path: Path
) -> None:
    certificate = tmp_path / "cert.pub"
    if text is not None:
        certificate.write_text(text)
    connect(one_hop(board, certificate=str(certificate))).close()
    (board.home / "authorized_keys").write_text("")
    with pytest.raises(AuthenticationError, match=r"cert\.pub \((No such file|no certificate)"):
        connect(one_hop(board, certificate=str(certificate)))


def test_key_is_tried_without_a_certificate_that_nobody_knows(board: LoopbackDevice, tmp_path: Path) -> None:
    authority = tmp_path / "authority"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(authority)], check=True)
    sign(board, authority, "-n", "somebody")
    board.connect().close()


def test_key_with_a_passphrase_asks_for_it(board: LoopbackDevice) -> None:
    path = board.home / "id_ed25519"
    command = ["ssh-keygen", "-q", "-p", "-P", "", "-N", "opensesame", "-f", str(path)]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(AuthenticationError, match="has a passphrase"):
        board.connect()
    connect(one_hop(board), lambda question: "opensesame").close()


@contextlib.contextmanager
def running_agent(board: LoopbackDevice) -> Iterator[Path]:
    """The socket of an agent that holds the user's key."""
    agent_socket = board.home / "agent"
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", str(agent_socket)], stdout=subprocess.DEVNULL)
    try:
        environment = {"SSH_AUTH_SOCK": str(agent_socket), "PATH": "/usr/bin:/bin"}
        add = ["ssh-add", "-q", str(board.home / "id_ed25519")]
        # the agent makes its socket a moment after it starts
        for _ in range(200):
            if subprocess.run(add, env=environment, capture_output=True).returncode == 0:
                break
        yield agent_socket
    finally:
        agent.terminate()
        agent.wait()


def test_agent_at_the_configured_socket_logs_in(board: LoopbackDevice) -> None:
    with running_agent(board) as agent_socket:
        connect(one_hop(board, identities=(), identities_only=False, agent_socket=str(agent_socket))).close()


def test_nothing_listens_is_unreachable_with_address_and_port(board: LoopbackDevice) -> None:
    with pytest.raises(UnreachableError, match=r"cannot reach 127\.0\.0\.1 port 1 \(Connection refused\)"):
        connect(one_hop(board, port=1))


def test_a_name_that_does_not_resolve_is_told_in_words(board: LoopbackDevice) -> None:
    with pytest.raises(
        UnreachableError, match=r"cannot reach desk\.invalid port 22 \([A-Z][a-z ]+\); is it on"
    ):
        connect(one_hop(board, host="desk.invalid", port=22))


def test_nothing_listens_behind_a_jump_host(board: LoopbackDevice) -> None:
    told = r"inner: cannot reach 127\.0\.0\.1 port 1 \(the jump host says: Connect failed\)"
    with pytest.raises(UnreachableError, match=told):
        connect(Route(hops=(board.hop(), board.hop(alias="inner", port=1))))


def test_a_service_that_the_device_cannot_reach_is_told_in_words(board: LoopbackDevice) -> None:
    with board.connect() as connection:
        facts = gather_facts(connection, board.device("board"), ("127.0.0.1:1",))
    assert facts.reach == {"127.0.0.1:1": "Connection refused"}


def test_two_jumps_reach_the_device(board: LoopbackDevice) -> None:
    hop = board.hop()
    route = Route(hops=(replace(hop, alias="a"), replace(hop, alias="b"), hop))
    with connect(route) as connection:
        assert connection.run("echo $SSH_CONNECTION").stdout.startswith("127.0.0.1 ")


def test_device_without_sftp_is_told_what_it_lacks(tmp_path: Path) -> None:
    board = LoopbackDevice(tmp_path / "board", subsystem="")
    try:
        with (
            board.connect() as connection,
            pytest.raises(DeployError, match="Subsystem sftp"),
            connection.sftp_lane(0.0),
        ):
            pass
    finally:
        board.close()


def test_lost_connection_in_a_command_is_unreachable(board: LoopbackDevice) -> None:
    with board.connect() as connection, pytest.raises(UnreachableError, match="connection was lost"):
        connection.run("kill -9 $PPID; sleep 30")


CONFIG = """\
Host gate
    HostName 10.0.0.1
    User porter
    Port 2200
Host nano*
    HostName %h.lan
    User edge
    ProxyJump gate,mid@10.0.0.2:2222
    IdentityFile ~/.ssh/fleet
    CertificateFile %d/.ssh/%h-cert.pub
    ForwardAgent yes
    IdentityAgent none
    ConnectTimeout 7
    ServerAliveInterval 25
    UserKnownHostsFile ~/.ssh/fleet_hosts ~/.ssh/more
    StrictHostKeyChecking yes
Host loop
    ProxyJump loop
"""


@pytest.fixture
def files(tmp_path: Path) -> SshFiles:
    (tmp_path / "config").write_text(CONFIG)
    return replace(load_ssh_files(tmp_path / "config"), agent_socket="/agent")


def test_config_decides_hops_users_keys_and_files(files: SshFiles, board: LoopbackDevice) -> None:
    device = board.device("nano1", address="", user="", port=0, identity_file="/keys/own")
    first, second, last = route_to(device, files).hops
    assert (first.host, first.port, first.user) == ("10.0.0.1", 2200, "porter")
    assert (second.host, second.port, second.user) == ("10.0.0.2", 2222, "mid")
    assert (last.host, last.port, last.user, last.timeout_s) == ("nano1.lan", 22, "edge", 7.0)
    assert last.identities == ("/keys/own", str(Path.home() / ".ssh/fleet"))
    assert (last.agent_socket, last.accept_new, last.keepalive_s) == ("", False, 25)
    assert last.certificate == str(Path.home() / ".ssh/nano1.lan-cert.pub")
    assert first.keepalive_s == KEEPALIVE_S
    assert first.certificate == ""
    assert [Path(path).name for path in last.known_hosts[:2]] == ["fleet_hosts", "more"]


def test_inventory_beats_the_config(files: SshFiles, board: LoopbackDevice) -> None:
    device = board.device("nano1", address="", user="root", port=2022, identity_file="", jump="none")
    (only,) = route_to(device, files).hops
    assert (only.user, only.port) == ("root", 2022)


def test_jump_loop_is_an_error_not_a_hang(files: SshFiles, board: LoopbackDevice) -> None:
    with pytest.raises(ConfigError, match="loop"):
        route_to(board.device("loop", address=""), files)

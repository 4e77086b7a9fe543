"""One deployer at a time; a dead one does not block the device; a replaced one cannot go on."""

from __future__ import annotations

import pytest

from starsd_deploy.device import DeviceShell, LeaseLostError
from starsd_deploy.lease import Holder, Lease
from starsd_edge.errors import DeployError
from tests.deploy.loopback import LoopbackDevice

ANNA = Holder("anna@desk", "apply")
BERT = Holder("bert@lap", "rollback")


def test_second_deployer_is_told_who_holds_it(board: LoopbackDevice) -> None:
    refused = pytest.raises(DeployError, match=r"anna@desk is at work \(apply\).*starsd deploy unlock board")
    with board.connect() as one, board.connect() as two, Lease(one, str(board.root), ANNA), refused:
        Lease(two, str(board.root), BERT).__enter__()
    with board.connect() as two, Lease(two, str(board.root), BERT):
        pass


def test_ctrl_c_drops_it(board: LoopbackDevice) -> None:
    with board.connect() as one, pytest.raises(KeyboardInterrupt), Lease(one, str(board.root), ANNA):
        raise KeyboardInterrupt
    assert not (board.root / "lease" / "beat").exists()


@pytest.mark.parametrize(
    "beat",
    [
        pytest.param("{boot} {late}", id="no heartbeat for 45 s"),
        pytest.param("another-boot {now}", id="the device rebooted"),
        pytest.param("", id="a power cut emptied the file"),
    ],
)
def test_dead_deployer_is_replaced_and_cannot_go_on(board: LoopbackDevice, beat: str) -> None:
    with board.connect() as one, board.connect() as two:
        dead = DeviceShell(one, str(board.root), "dead")
        dead.do("lease_take", "{}")
        file = board.root / "lease" / "beat"
        boot, now = file.read_text().split()
        file.write_text(beat.format(boot=boot, now=now, late=int(now) - 46))
        with Lease(two, str(board.root), BERT):
            with pytest.raises(LeaseLostError, match="another deployer has taken the device over"):
                dead.do("prepare")
            with pytest.raises(LeaseLostError):
                dead.do("lease_beat")


def test_heartbeat_keeps_it(board: LoopbackDevice) -> None:
    file = board.root / "lease" / "beat"
    with board.connect() as one, Lease(one, str(board.root), ANNA, beat_s=0.01) as shell:
        file.unlink()
        # the renewal writes the file again; asking the device takes longer than a beat
        for _ in range(100):
            shell.connection.run("true")
            if file.exists():
                break
        assert file.exists()


def test_dropping_a_lost_lease_leaves_the_new_one(board: LoopbackDevice) -> None:
    with board.connect() as one, board.connect() as two:
        dead = DeviceShell(one, str(board.root), "dead")
        dead.do("lease_take", "{}")
        (board.root / "lease" / "beat").unlink()
        with Lease(two, str(board.root), BERT):
            dead.do("lease_drop")
            assert (board.root / "lease" / "token").exists()

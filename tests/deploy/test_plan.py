"""The plan holds what is missing and nothing else, for every history a device may have had.

`after` is the specification of the steps: what a device's state is once a step has been done.
"""

from __future__ import annotations

import hashlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from starsd_deploy.blobs import Blob
from starsd_deploy.commands import ServiceLink, bundle_link, run_script, unit_name, unit_text
from starsd_deploy.facts import Manifest, ReleaseFacts, State
from starsd_deploy.inventory import Device, Role
from starsd_deploy.plan import PLAN_VERSION, Plan, Wanted, plan_device, read_plan, write_plan
from starsd_deploy.releases import kept_releases, make_release, rollback_target
from starsd_deploy.steps import (
    Bundle,
    Confirm,
    Content,
    ContentFile,
    Gate,
    InstallUnit,
    MakeKey,
    Pin,
    Prepare,
    Prune,
    Release,
    Restart,
    Step,
    Switch,
    Trust,
    Upload,
    WheelFile,
    describe,
)
from starsd_deploy.wheels import DeviceEnvironment, WheelSet
from starsd_edge.errors import ConfigError, ResourceError, UsageError
from tests.deploy.samples import bare, facts_with

KEY = "d$]8>lH>dH+MFfOlL5w)i1Al$EU/CrEW)cu-]JZA"
SERVICE_KEY = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
SERVICE = ServiceLink("desk", "tcp://10.0.0.2:7731", SERVICE_KEY, is_fleet_device=True)
DEVICE = Device(name="nano1", roles=(Role.TARGET,), bundle="/b", service=("desk",), keep_releases=2)
FACTS = bare(facts_with())


def blob(name: str, size: int = 1000) -> Blob:
    return Blob(hashlib.sha256(name.encode()).hexdigest(), size, f"/src/{name}")


def wanted(version: str, admitted: str, service_key: str = SERVICE_KEY, device: Device = DEVICE) -> Wanted:
    wheels = (WheelFile("common-1-py3-none-any.whl", blob("common")), WheelFile("p.whl", blob(version)))
    files = (
        ContentFile("manifest.json", blob("m" + version)),
        ContentFile("weights", blob("shared weights", 10**6)),
    )
    contents = (Content(bundle_link(device), "b" + version, files),)
    services = (ServiceLink("desk", SERVICE.address, service_key, is_fleet_device=True),)
    wheel_set = WheelSet(DeviceEnvironment("3.11", "x86_64", (2, 36)), wheels)
    release = make_release(device, FACTS, version, wheel_set, contents, services)
    return Wanted(release, contents, services, {"desk": admitted})


def after(state: State, step: Step, admitted: dict[str, str]) -> State:
    """A device's state once `step` was done. `admitted` is the draft device's and changed in place."""
    change = msgspec.structs.replace
    match step:
        case Prepare():
            return state
        case Upload():
            return change(state, blobs=state.blobs | {b.sha256: b.size for b in step.blobs})
        case Bundle():
            return change(state, bundles=tuple(sorted({*state.bundles, step.content.id})))
        case Release():
            manifest = msgspec.json.decode(step.manifest, type=Manifest)
            return change(with_release(state, step.id, complete=True), manifests=(*state.manifests, manifest))
        case MakeKey():
            return change(state, public_key=KEY)
        case Pin():
            key = step.public_key or SERVICE_KEY
            pending = state.restart_pending or bool(state.current)
            return change(
                state, pinned=state.pinned | {step.service: f"{key} {step.address}"}, restart_pending=pending
            )
        case Trust():
            admitted[step.service] = state.public_key
            return state
        case Gate():
            return with_release(state, step.release, gated=True)
        case Switch():
            return change(state, current=step.release, history=(*state.history, step.release))
        case InstallUnit():
            running = state.running if state.unit_active else state.current
            sha = hashlib.sha256(step.text.encode()).hexdigest()
            return change(state, unit_sha256=sha, unit_enabled=True, unit_active=True, running=running)
        case Restart():
            return change(state, running=state.current, unit_active=True, restart_pending=False)
        case Confirm():
            return with_release(state, step.release, confirmed=True)
        case Prune():
            keep = set(zip(step.keep[::2], step.keep[1::2], strict=True))
            return change(
                state,
                releases=tuple(r for r in state.releases if ("release", r.id) in keep),
                manifests=tuple(m for m in state.manifests if ("release", m.id) in keep),
                bundles=tuple(b for b in state.bundles if ("bundle", b) in keep),
                blobs={sha: size for sha, size in state.blobs.items() if ("blob", sha) in keep},
            )


def with_release(state: State, release_id: str, **marks: bool) -> State:
    fresh = msgspec.structs.replace(state.release(release_id), **marks)
    others = tuple(release for release in state.releases if release.id != release_id)
    return msgspec.structs.replace(state, releases=(*others, fresh))


def steps_for(
    state: State, version: str, admitted: dict[str, str], device: Device = DEVICE
) -> tuple[Step, ...]:
    facts = msgspec.structs.replace(FACTS, state=state)
    return plan_device(device, facts, wanted(version, admitted.get("desk", ""))).steps


def run(state: State, steps: tuple[Step, ...], admitted: dict[str, str]) -> State:
    for step in steps:
        state = after(state, step, admitted)
        assert_serving(state)
    return state


def assert_serving(state: State) -> None:
    """At every point what is current passed its gate and has all it needs."""
    if not state.current:
        return
    assert state.release(state.current).gated
    manifest = next(m for m in state.manifests if m.id == state.current)
    assert set(manifest.links.values()) <= set(state.bundles)


def test_bare_device_gets_every_kind_of_step_in_order() -> None:
    kinds = [type(step) for step in steps_for(FACTS.state, "1.0", {})]
    assert kinds == [
        Prepare,
        Upload,
        Bundle,
        Release,
        MakeKey,
        Pin,
        Trust,
        Gate,
        Switch,
        InstallUnit,
        Confirm,
    ]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["1.0", "2.0", "3.0", "4.0"]), st.integers(0, 20)), max_size=5))
def test_any_history_of_cuts_is_finished_by_the_next_apply(history: list[tuple[str, int]]) -> None:
    """Deployments of any versions, each cut after any step; then one that is not; then nothing is left."""
    state = FACTS.state
    admitted: dict[str, str] = {}
    for version, cut in history:
        state = run(state, steps_for(state, version, admitted)[:cut], admitted)
    state = run(state, steps_for(state, "5.0", admitted), admitted)
    assert steps_for(state, "5.0", admitted) == ()
    assert state.current == state.running
    assert state.current.startswith("5.0-")
    assert len(state.releases) <= DEVICE.keep_releases
    # and back again, without sending anything that stayed
    back = steps_for(state, "5.0", admitted, msgspec.structs.replace(DEVICE, keep_releases=1))
    assert all(isinstance(step, Prune) for step in back)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 20), st.integers(0, 20))
def test_what_is_there_is_never_sent_again(first: int, second: int) -> None:
    state, admitted = FACTS.state, {}
    for version, cut in (("1.0", first), ("2.0", second), ("1.0", 20)):
        steps = steps_for(state, version, admitted)
        for step in steps:
            if isinstance(step, Upload):
                assert not {blob.sha256 for blob in step.blobs} & set(state.blobs)
        state = run(state, steps[:cut], admitted)


def deployed(*versions: str, device: Device = DEVICE) -> tuple[State, dict[str, str]]:
    state, admitted = FACTS.state, {}
    for version in versions:
        state = run(state, steps_for(state, version, admitted, device), admitted)
    return state, admitted


def test_second_version_shares_what_both_have() -> None:
    state, admitted = deployed("1.0")
    sent = [b.source for s in steps_for(state, "2.0", admitted) if isinstance(s, Upload) for b in s.blobs]
    assert sorted(sent) == ["/src/2.0", "/src/m2.0"]


def test_rotated_service_key_is_pinned_and_the_process_restarted() -> None:
    state, admitted = deployed("1.0")
    facts = msgspec.structs.replace(FACTS, state=state)
    rotated = wanted("1.0", admitted["desk"], service_key=KEY)
    kinds = [type(step) for step in plan_device(DEVICE, facts, rotated).steps]
    assert kinds == [Pin, Restart, Confirm]


def test_key_that_the_service_lost_is_trusted_again_without_a_restart() -> None:
    state, _ = deployed("1.0")
    assert [type(step) for step in steps_for(state, "1.0", {})] == [Trust]


def test_stopped_service_is_started() -> None:
    state, admitted = deployed("1.0")
    stopped = msgspec.structs.replace(state, running="", unit_active=False)
    assert [type(step) for step in steps_for(stopped, "1.0", admitted)] == [Restart, Confirm]


def test_changed_unit_is_installed_and_the_process_restarted_only_if_it_is_another_release() -> None:
    state, admitted = deployed("1.0")
    slower = msgspec.structs.replace(DEVICE, drain_s=99.0)
    assert [type(step) for step in steps_for(state, "1.0", admitted, slower)] == [InstallUnit, Confirm]
    text = unit_text(slower, state.root, FACTS.user, FACTS.device_groups)
    assert "TimeoutStopSec=104" in text  # the service ends an answer itself before systemd kills it
    assert "--drain 99" in run_script(slower, state.root, ())
    assert unit_name(Role.TARGET) == "starsd-target.service"


def test_small_disk_stops_before_anything_is_sent() -> None:
    facts = msgspec.structs.replace(FACTS, disk_free_bytes=50 << 20)
    with pytest.raises(ResourceError, match=r"MiB of disk needed .* 50 MiB free"):
        plan_device(DEVICE, facts, wanted("1.0", ""))


def test_plan_file_is_the_plan() -> None:
    one = plan_device(DEVICE, FACTS, wanted("1.0", ""))
    whole = Plan(PLAN_VERSION, "fleet.toml", (one,))
    assert read_plan(write_plan(whole), "p.json") == whole
    assert all(describe(step)[0] in "+~-?" for step in one.steps)


@pytest.mark.parametrize("data", [b"", b"{}", b'{"version": 99, "fleet": "", "devices": []}'])
def test_what_is_no_plan_is_refused(data: bytes) -> None:
    with pytest.raises(ConfigError, match=r"p\.json"):
        read_plan(data, "p.json")


def test_release_name_depends_on_everything_that_makes_it() -> None:
    base = wanted("1.0", "").release.id
    assert wanted("1.0", "other").release.id == base
    louder = msgspec.structs.replace(DEVICE, arguments=("--debug",))
    assert wanted("1.0", "", device=louder).release.id != base
    assert wanted("1.1", "").release.id != base


def test_every_service_of_a_target_reaches_what_it_runs_and_its_settings() -> None:
    """The first is preferred; a chat by hand on the device has the same ones as the endpoint."""
    spare = ServiceLink("spare", "tcp://10.0.0.3:7731", KEY, is_fleet_device=False)
    wheel_set = WheelSet(DeviceEnvironment("3.11", "x86_64", (2, 36)), ())
    release = make_release(DEVICE, FACTS, "1.0", wheel_set, (), (SERVICE, spare))
    both = "tcp://10.0.0.2:7731,tcp://10.0.0.3:7731"
    assert f"--service {both}" in release.run
    assert f'service = "{both}"\n' in release.config
    assert f'bundle = "{FACTS.state.root}/current/{bundle_link(DEVICE)}"\n' in release.config
    assert "ping tcp://10.0.0.3:7731" in release.gate
    drafting = Device(name="desk", roles=(Role.DRAFT,), head="/h")
    assert make_release(drafting, FACTS, "1.0", wheel_set, (), ()).config == ""


def test_model_keeps_the_name_of_its_bundle_on_the_device() -> None:
    """Its folder there is named by a hash; the endpoint calls the model as the path it was given ends."""
    device = msgspec.structs.replace(DEVICE, bundle="/srv/bundles/vicuna-7b-int4")
    release = wanted("1.0", "", device=device).release
    assert release.links == {"bundle/vicuna-7b-int4": "b1.0"}
    assert "serve --bundle bundle/vicuna-7b-int4 " in release.run
    assert "bundle verify bundle/vicuna-7b-int4 " in release.gate


def live(*history: str, current: str, ungated: tuple[str, ...] = ()) -> State:
    releases = tuple(ReleaseFacts(name, True, name not in ungated, True) for name in sorted(set(history)))
    return State(releases=releases, history=history, current=current)


@pytest.mark.parametrize(
    ("state", "target"),
    [
        (live("a", "b", current="b"), "a"),
        (live("a", "b", "c", current="c"), "b"),
        (live("a", "b", "a", "c", current="c"), "a"),
        (live("a", "b", "c", current="c", ungated=("b",)), "a"),
    ],
)
def test_rollback_goes_to_what_was_live_before(state: State, target: str) -> None:
    assert rollback_target(state) == target


def test_second_rollback_does_not_go_forward_again() -> None:
    with pytest.raises(UsageError, match=r"ready \(--to\): b"):
        rollback_target(live("a", "b", "a", current="a"))
    assert rollback_target(live("a", "b", "a", current="a"), to="b") == "b"
    with pytest.raises(UsageError, match="'x' cannot be gone back to; ready are: b"):
        rollback_target(live("a", "b", "a", current="a"), to="x")


@pytest.mark.parametrize(
    ("keep", "kept"), [(1, ("d",)), (2, ("d", "c")), (3, ("d", "c", "b")), (9, ("d", "c", "b", "a"))]
)
def test_latest_live_releases_stay(keep: int, kept: tuple[str, ...]) -> None:
    assert kept_releases(live("a", "b", "a", "b", "c", current="c"), "d", keep) == kept

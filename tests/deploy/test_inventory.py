"""An inventory is right, or the message names file, line, key and what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from starsd_deploy.inventory import Role, UnitScope, inventory_schema, line_of, load_fleet, parse_fleet
from starsd_edge.errors import ConfigError, UsageError

FLEET = """\
[defaults]
user = "edge"
bundle = "bundles/small"
head = "heads/small"
service = ["desk", "lab"]

[devices.desk]
address = "10.0.0.2"
roles = ["draft"]
tags = ["room-1"]

[devices.nano1]
roles = ["target"]
unit = "user"
tags = ["room-1", "orin"]

[devices.nano2]
roles = ["target"]
user = "root"
bundle = "/srv/large"

[services.lab]
address = "tcp://10.0.0.9:7731"
key = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
"""


def parse(text: str) -> object:
    return parse_fleet(text, Path("/site/fleet.toml"))


def test_defaults_are_inherited_and_paths_start_at_the_file() -> None:
    fleet = parse_fleet(FLEET, Path("/site/fleet.toml"))
    desk, nano1, nano2 = fleet.devices
    assert (desk.role, desk.host, desk.bundle, desk.head) == (Role.DRAFT, "10.0.0.2", "", "/site/heads/small")
    assert (nano1.host, nano1.user, nano1.bundle) == ("nano1", "edge", "/site/bundles/small")
    assert nano1.unit is UnitScope.USER
    assert (nano2.user, nano2.bundle, nano2.service) == ("root", "/srv/large", ("desk", "lab"))


@pytest.mark.parametrize(
    ("limit", "exclude", "tags", "names"),
    [
        ((), (), (), ["desk", "nano1", "nano2"]),
        (("nano*",), (), (), ["nano1", "nano2"]),
        ((), ("nano*",), (), ["desk"]),
        ((), (), ("room-1",), ["desk", "nano1"]),
        (("nano*",), (), ("orin", "thor"), ["nano1"]),
    ],
)
def test_select(
    limit: tuple[str, ...], exclude: tuple[str, ...], tags: tuple[str, ...], names: list[str]
) -> None:
    fleet = parse_fleet(FLEET, Path("/site/fleet.toml"))
    assert [device.name for device in fleet.select(limit, exclude, tags)] == names


def test_selecting_nothing_is_an_error() -> None:
    with pytest.raises(UsageError, match="no device"):
        parse_fleet(FLEET, Path("/site/fleet.toml")).select(("thor*",), (), ())


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('unit = "user"', 'unit = "root"', r"line 14, devices\.nano1\.unit: .*root'; allowed: system, user$"),
        ('unit = "user"', 'runtime = "x"', r"nano1\.runtime: .*'x'; allowed: onnxruntime, tensorrt$"),
        (
            'unit = "user"',
            "unitt = 1",
            r"line 14, devices\.nano1\.unitt: .*unknown field `unitt`; allowed: .*unit",
        ),
        (
            'roles = ["draft"]',
            'roles = ["drafter"]',
            r"line 9, devices\.desk\.roles.*r'; allowed: target, draft$",
        ),
        ('roles = ["draft"]', "", r"line 7, devices\.desk: .*missing required field `roles`"),
        ('roles = ["draft"]', "roles = []", r"line 7, devices\.desk: roles must name one role"),
        ('user = "edge"', "user = 7", r"line 2, defaults\.user: Expected `str`, got `int`"),
        ('user = "edge"', 'address = "x"', r"line 2, defaults\.address: 'address' belongs to one device"),
        (
            'service = ["desk", "lab"]',
            'service = ["dusk"]',
            r"devices\.nano1\.service: 'dusk' is no draft device",
        ),
        ("rq:rM", "rq", r"services\.lab: key is not a public key"),
        ("tcp://10.0.0.9:7731", "10.0.0.9", r"services\.lab: address '10\.0\.0\.9' is not"),
        ("[devices.nano2]", "[device.nano2]", r"line 17, device: .*unknown field `device`"),
        ("[devices.nano2]", '[devices."na no"]', r"name 'na no' must start with"),
        ('user = "root"', "keep_releases = 0", r"keep_releases must be at least 1"),
        ('user = "root"', "drain_s = 1e9", r"drain_s must be between 0 and 86400"),
        ('user = "root"', "endpoint_port = 70000", r"endpoint_port 70000"),
        ('user = "root"', 'root = "../x"', r"no '\.\.'"),
        ('user = "root"', "user = ", r"not TOML: .*line 19"),
        ('user = "root"', "user = " + "[" * 5000, r"not TOML"),
    ],
)
def test_mistakes_name_file_line_and_key(old: str, new: str, message: str) -> None:
    assert old in FLEET
    with pytest.raises(ConfigError, match=message) as caught:
        parse(FLEET.replace(old, new, 1))
    assert str(caught.value).startswith("/site/fleet.toml")


def test_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="starsd deploy init"):
        load_fleet(tmp_path / "fleet.toml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty; remove it and run: starsd deploy init"),
        ("# nothing\n", "the file is empty"),
        ("[project]\nname = 'x'\n", r"no inventory, for want of a \[devices.NAME\] table; .* --fleet"),
    ],
)
def test_a_file_that_is_no_inventory_says_what_to_do(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(text)


def test_lines_are_found_in_tables_and_dotted_keys() -> None:
    text = "a = 1\n[t]\nb.c = 2\n[[x]]\n['q']\nd=3\n"
    assert [line_of(text, k) for k in (("a",), ("t",), ("t", "b", "c"), ("q", "d"), ("no",))] == [
        1,
        2,
        3,
        6,
        0,
    ]


def test_schema_lists_every_key_an_editor_may_offer() -> None:
    properties = inventory_schema()["$defs"]["Device"]["properties"]
    assert {"address", "roles", "bundle", "service"} <= set(properties)

"""The page on ZStack has the plug-in's options and mapping, and names each field of a port without one."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest

from netplugin.api.models import PortSpec
from tests.unit.zstack.conftest import PLUGINS

PAGE = (PLUGINS.parents[1] / "docs/zstack.md").read_text()


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The plug-in under Python 3, with the least of zstacklib that it needs to be loaded."""
    ovs, log = ModuleType("zstacklib.utils.ovs"), ModuleType("zstacklib.utils.log")
    vars(ovs).update(OvsDpdkCtl=type("OvsDpdkCtl", (), {}), getOvsCtl=lambda _=None: None)
    vars(log).update(get_logger=lambda name: type("Logger", (), {"info": lambda self, text: None})())
    utils = ModuleType("zstacklib.utils")
    vars(utils).update(ovs=ovs, log=log)
    monkeypatch.setitem(sys.modules, "zstacklib", ModuleType("zstacklib"))
    monkeypatch.setitem(sys.modules, "zstacklib.utils", utils)
    found = importlib.util.spec_from_file_location("netplugin_zstack", PLUGINS / "netplugin_zstack.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    found.loader.exec_module(module)
    return module


def rows(heading: str) -> list[str]:
    """The rows of the table with this heading."""
    _, _, after = PAGE.partition(f"{heading}\n")
    return after.partition("\n\n")[0].splitlines()[1:]


def test_the_options_are_the_plugins(plugin: Any) -> None:
    expected = [
        f"| `{name}` | {f'`{default}`' if default else ''} | {says} |"
        for name, default, says in plugin.OPTIONS
    ]
    assert rows("| Option in `[zstack]` | Default | Meaning |") == expected


def test_the_mapping_of_nics_is_the_plugins(plugin: Any) -> None:
    expected = [f"| {fields} | `{path}` | {says} |" for fields, path, _, says in plugin.MAPPING]
    assert rows("| ZStack's NIC | Field of the port | Value |") == expected


def test_the_mapping_of_bonds_is_the_plugins(plugin: Any) -> None:
    modes: dict[str, list[str]] = {}
    for theirs, ours in plugin.BOND_MODES.items():
        modes.setdefault(ours, []).append(f"`{theirs}`")
    expected = [f"| {', '.join(theirs)} | `{ours}` |" for ours, theirs in modes.items()]
    assert rows("| `mode` in `dpdk-bond.yaml` | Mode of the bond |") == expected


def test_each_field_of_a_port_is_mapped_or_listed_as_not(plugin: Any) -> None:
    mapped = {path.partition(".")[0] for _, path, _, _ in plugin.MAPPING} | {"vm_id"}
    assert mapped <= set(PortSpec.model_fields)
    _, _, unmapped = PAGE.partition("The PortSpec fields ")
    sentence = unmapped.partition(":")[0]
    named = {name for name in PortSpec.model_fields if f"`{name}`" in sentence}
    assert named == set(PortSpec.model_fields) - mapped, (
        "name it in docs/zstack.md, after 'The PortSpec fields'"
    )

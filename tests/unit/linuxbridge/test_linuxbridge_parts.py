"""The parts of the linuxbridge backend that need no host: options, rules, names, news."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from oslo_config import cfg

from drivers.linuxbridge import filters
from drivers.linuxbridge.changes import Bridge, bridge_mark
from drivers.linuxbridge.options import GROUP, OPTIONS, Settings
from drivers.linuxbridge.plan import is_our_bridge
from netplugin.backend import Intent
from netplugin.host.links import DELLINK, NEWLINK, Link, attributes, link_event, messages
from netplugin.host.nftables import Rule
from netplugin.models import PortSpec
from tests.unit.linuxbridge.model import Model


def load(tmp_path: Path, text: str) -> Settings:
    file = tmp_path / "netplugin.conf"
    file.write_text(f"[linuxbridge]\n{text}\n")
    conf = cfg.ConfigOpts()
    conf.register_opts(OPTIONS, group=GROUP)
    conf([], default_config_files=[str(file)], default_config_dirs=[])
    return Settings.read(conf)


def test_a_network_may_have_an_interface_or_none(tmp_path: Path) -> None:
    settings = load(tmp_path, "physical_interfaces = net1:eth1, net2: ,net3:eth1.7")
    assert settings.physical_interfaces == {"net1": "eth1", "net2": "", "net3": "eth1.7"}
    assert settings.shared_interfaces() == []


def test_a_network_named_twice_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(cfg.ConfigFileValueError):
        load(tmp_path, "physical_interfaces = net1:eth1,net1:eth2")


def test_an_interface_named_twice_is_found(tmp_path: Path) -> None:
    assert load(tmp_path, "physical_interfaces = a:eth1,b:eth1,c:,d:").shared_interfaces() == [
        "eth1"
    ]


def test_rules_are_equal_if_they_do_the_same() -> None:
    address: dict[str, Any] = {"payload": {"protocol": "ip6", "field": "saddr"}}

    def rule(right: str, counter: Any) -> Rule:
        match = {"match": {"op": "==", "left": address, "right": right}}
        return Rule.make(match, {"counter": counter}, {"drop": None})

    wanted = rule("::ffff:102:304", None)
    found = rule("::ffff:1.2.3.4", {"packets": 7, "bytes": 420})
    assert wanted == found and "counter" in wanted.text
    assert wanted != rule("::ffff:1.2.3.5", None)
    assert wanted.said("mine") != wanted and wanted.said("mine").comment == "mine"
    assert wanted.comment is None and "comment" not in wanted.fields()


def test_a_chain_says_whose_it_is(spec: PortSpec) -> None:
    assert filters.owner(filters.port_chain("port-1", spec)) == "port-1"
    assert filters.owner(filters.BASE["prerouting"]) is None


@pytest.fixture
def spec() -> PortSpec:
    return PortSpec.model_validate(
        {
            "vm_id": "vm",
            "mac": "52:54:00:00:00:01",
            "backend": "linuxbridge",
            "network": {"type": "flat", "physical_network": "net1"},
            "queues": 4,
            "port_security": {"allowed_addresses": [{"ip": "10.0.0.5"}, {"ip": "10.0.0.5"}]},
        }
    )


def test_an_address_given_twice_makes_its_rules_once(spec: PortSpec) -> None:
    rules = filters.port_chain("port-1", spec).rules
    assert len(rules) == len(set(rules))


def test_a_bridge_carries_its_network_and_uplink() -> None:
    assert bridge_mark(Bridge("b", "net1", "eth1", 1500).alias) == ("net1", "eth1")
    assert bridge_mark(Bridge("b", "net1", "", 1500).alias) == ("net1", "")
    assert bridge_mark("something else") is None and bridge_mark(None) is None


def test_the_address_of_a_bridge_is_a_mark_until_it_has_one() -> None:
    born = Link(1, "b", "bridge", address=Bridge("b", "net1", "", 1500).address)
    assert is_our_bridge(born, "net1") and not is_our_bridge(born, "net2")
    first = int((born.address or "")[:2], 16)
    assert first & 3 == 2, "unicast and locally administered"
    claimed = Link(1, "b", "bridge", address=born.address, alias="an operator's")
    assert not is_our_bridge(claimed, "net1")


def test_the_binding_names_the_tap_and_its_bridge(spec: PortSpec) -> None:
    binding = Model().driver.binding(Intent("port-1", spec))
    extra = binding.model_extra or {}
    assert binding.vif_type == "tap" and extra["device"] in binding.interface_xml
    assert 'managed="no"' in binding.interface_xml and 'queues="4"' in binding.interface_xml
    assert not binding.domain_requirements.shared_memory
    assert extra["bridge"].startswith("npb") and len(extra["device"]) < 16


def attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


@pytest.mark.parametrize(("kind", "gone"), [(NEWLINK, False), (DELLINK, True)])
def test_news_of_a_link(kind: int, gone: bool) -> None:
    payload = struct.pack("=BxHiII", 0, 1, 7, 1, 0)
    payload += attribute(3, b"npt1\0") + attribute(4, struct.pack("=I", 1400))
    payload += attribute(20, b"netplugin-port=p\0")
    event = link_event(kind, payload)
    assert event is not None and (event.gone, event.name, event.mtu, event.up) == (
        gone, "npt1", 1400, True,
    )  # fmt: skip
    assert event.alias == "netplugin-port=p" and event.master == 0
    assert link_event(kind, b"\x07" + payload[1:]) is None, "a bridge's word of its member"
    assert link_event(99, payload) is None


def test_broken_netlink_ends_the_reading() -> None:
    assert list(messages(bytes(16))) == []
    assert list(messages(b"\1")) == []
    assert list(attributes(bytes(8), 0)) == []

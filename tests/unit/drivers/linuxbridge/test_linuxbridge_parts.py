"""The parts of the linuxbridge backend that need no host: options, rules, names, news."""

from __future__ import annotations

import errno
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from oslo_config import cfg
from pyroute2.netlink.rtnl import RTM_DELLINK, RTM_NEWLINK

from drivers.linuxbridge import filters
from drivers.linuxbridge.options import GROUP, OPTIONS, Settings
from drivers.linuxbridge.segments import (
    Segment,
    bridge_mark,
    bridge_of,
    is_ours,
    shaper_of,
)
from drivers.linuxbridge.watch import BridgeWatch, LinkNews
from netplugin.api.models import PortSpec
from netplugin.backend import Intent
from netplugin.host.link_messages import link_event
from netplugin.host.link_values import Ifb, Link
from netplugin.host.links import Links
from netplugin.host.names import provisional_mac
from netplugin.host.netlink import attribute, attributes, numbered
from netplugin.host.tc import Tbf
from netplugin.host.usability import Wake
from tests.unit.drivers.linuxbridge.model import Model
from tests.unit.kernel_answers import message


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


def test_tunnels_end_at_an_address(tmp_path: Path) -> None:
    assert load(tmp_path, "").local_ip == ""
    for text in ("10.0.0.7", "2001:DB8:0::7"):
        assert load(tmp_path, f"local_ip = {text}").local_ip == text.lower().replace(":0:", ":")
    with pytest.raises(cfg.ConfigFileValueError):
        load(tmp_path, "local_ip = a-host")


def test_a_network_named_twice_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(cfg.ConfigFileValueError):
        load(tmp_path, "physical_interfaces = net1:eth1,net1:eth2")


def test_an_interface_named_twice_is_found(tmp_path: Path) -> None:
    assert load(tmp_path, "physical_interfaces = a:eth1,b:eth1,c:,d:").shared_interfaces() == ["eth1"]


def test_a_chain_names_its_owner(spec: PortSpec) -> None:
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


@pytest.mark.parametrize(
    ("segment", "key"),
    [
        (Segment("net1"), "net1"),
        (Segment("net1", 100), "net1:100"),
        (Segment(network_id="blue"), "vxlan/blue"),
        (Segment("vxlan", 5), "vxlan:5"),
    ],
)
def test_a_segment_is_known_by_its_key(segment: Segment, key: str) -> None:
    assert segment.key == key and Segment.parse(key) == segment
    for uplink in ("eth1", ""):
        assert bridge_mark(bridge_of(segment, uplink, 1500).alias) == (segment, uplink)
    assert len({segment.bridge, segment.device, segment.key}) == 3


def test_what_is_no_mark_says_nothing() -> None:
    for alias in ("something else", None, "netplugin-bridge=net1:x"):
        assert bridge_mark(alias) is None


def test_the_address_of_a_device_is_a_mark_until_it_has_one() -> None:
    name = Segment("net1").bridge
    born = Link(1, name, "bridge", address=provisional_mac(name))
    assert is_ours(born)
    for wrong in (
        {"address": "02:00:00:00:00:01"},
        {"kind": "dummy"},
        {"name": Segment("net2").bridge},
        {"alias": "an operator's"},
        {"alias": "netplugin-bridge=net2"},
    ):
        assert not is_ours(replace(born, **wrong))
    assert int(provisional_mac(name)[:2], 16) & 3 == 2, "unicast and locally administered"
    shaper = shaper_of("p", 1500)
    assert is_ours(Link(1, shaper.name, "ifb", alias=shaper.alias, data=Ifb()))
    assert not is_ours(Link(1, shaper.name, "ifb", alias=shaper.alias + "x", data=Ifb()))


@pytest.mark.parametrize(
    ("kbps", "frame", "burst", "limit"),
    [
        (100_000, 1518, 125_000, 625_000),  # 10 ms, 50 ms
        (1_000, 1518, 1_518, 15_180),  # one frame, ten
        (1_000, 9018, 9_018, 90_180),
        (400_000_000, 9018, 500_000_000, 2_500_000_000),
    ],
)
def test_a_bucket_fits_its_rate(kbps: int, frame: int, burst: int, limit: int) -> None:
    tbf = Tbf.of(kbps, frame)
    assert tbf.kbps == kbps and tbf.limit == limit
    fits = tbf.burst_ns * tbf.rate // 10**9
    assert burst <= fits <= burst * 1.01 + 1, "the kernel counts in ticks of 64 ns"
    assert tbf.burst_ns % 64 == 0


def test_the_binding_names_the_tap_and_its_bridge(spec: PortSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the program of its guard, which takes longer than all else of a list of ports."""
    monkeypatch.setattr("drivers.linuxbridge.model.port_guard", lambda _: pytest.fail("no use for it"))
    binding = Model().driver.binding(Intent("port-1", spec))
    extra = binding.model_extra or {}
    assert binding.vif_type == "tap" and extra["device"] in binding.interface_xml
    assert 'managed="no"' in binding.interface_xml and 'queues="4"' in binding.interface_xml
    assert not binding.domain_requirements.shared_memory
    assert extra["bridge"].startswith("npb") and len(extra["device"]) < 16


@pytest.mark.parametrize(("kind", "gone"), [(RTM_NEWLINK, False), (RTM_DELLINK, True)])
def test_events_of_a_link(kind: int, gone: bool) -> None:
    payload = struct.pack("=BxHiII", 0, 1, 7, 1, 0)
    payload += attribute(3, b"npt1\0") + attribute(4, struct.pack("=I", 1400))
    payload += attribute(20, b"netplugin-port=p\0")
    event = link_event(message(kind, payload))
    assert event is not None and event.gone == gone
    link = event.link
    assert (link.name, link.mtu, link.up, link.alias) == ("npt1", 1400, True, "netplugin-port=p")
    assert link.master is None
    assert link_event(message(kind, b"\x07" + payload[1:])) is None, "a bridge's word of its member"
    assert link_event(message(28, payload)) is None


class _Source:
    """A socket with these datagrams; None: the kernel dropped some, as the socket was full."""

    def __init__(self, *queue: bytes | None) -> None:
        self._queue = list(queue)

    def recv(self, size: int, flags: int) -> bytes:
        if not self._queue:
            raise BlockingIOError
        data = self._queue.pop(0)
        if data is None:
            raise OSError(errno.ENOBUFS, "No buffer space available")
        return data


def _news(
    own: frozenset[str] | None, links: tuple[bytes | None, ...], rules: tuple[bytes | None, ...]
) -> list[Wake]:
    watch: Any = BridgeWatch.__new__(BridgeWatch)  # without sockets and thread
    watch._news, watch._links, watch._rules = LinkNews(frozenset, Links()), _Source(*links), _Source(*rules)
    watch._entries, watch._learned, watch._waiting = _Source(), _Source(), {}
    watch._devices = Links()
    return list(watch.decode(own))


#: Something in our table was changed (NFT_MSG_NEWRULE with NFPROTO_BRIDGE).
RULE = struct.pack("=BBH", 7, 0, 0) + attribute(1, filters.TABLE.encode() + b"\0")
RULE = struct.pack("=IHHII", 16 + len(RULE), 10 << 8 | 6, 0, 0, 0) + RULE


@pytest.mark.parametrize("own", [None, frozenset(), frozenset({"npt1"})])
def test_lost_news_wake_a_look_at_everything_also_amid_our_own_changes(
    own: frozenset[str] | None,
) -> None:
    (lost,) = _news(own, (None,), ())
    assert lost == Wake("events of links were lost") and lost.ports is None
    (*_, lost) = _news(own, (), (RULE, None))
    assert lost == Wake("events of nftables were lost") and lost.ports is None


def test_our_own_rules_are_no_news() -> None:
    (changed,) = _news(None, (), (RULE,))
    assert changed.ports is None and filters.TABLE in changed.reason
    assert _news(frozenset(), (), (RULE,)) == []


def test_broken_netlink_ends_the_reading() -> None:
    assert list(numbered(bytes(16))) == []
    assert list(numbered(b"\1")) == []
    assert list(attributes(bytes(8), 0)) == []

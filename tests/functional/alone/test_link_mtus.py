"""MTUs of real devices: what is found, and that the kernel accepts the fix, after which nothing is found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from netplugin.api.models import Finding
from netplugin.tuning.checks import check
from netplugin.tuning.checks.scene import Scene
from netplugin.tuning.read import read_facts
from netplugin.tuning.read.network import read_network
from netplugin.tuning.root import Root
from tests.lab.processes import run

FACTS = read_facts(Root())


def _ip(words: str) -> None:
    run(["ip", *words.split()])


@pytest.fixture(autouse=True)
def cable() -> Iterator[None]:
    """A veth, whose other end is the far end of the cable."""
    _ip("link add np-nic type veth peer name np-far")
    try:
        for name in ("np-nic", "np-far"):
            _ip(f"link set {name} up")
        yield
    finally:
        _ip("link del np-nic")


def found() -> list[Finding]:
    facts = replace(FACTS, network=read_network(Root()))
    return [f for f in check(Scene(facts)) if f.id == "mtu" and "np-" in f.found]


@pytest.mark.parametrize("raise_lower", [True, False])
@pytest.mark.parametrize(
    ("words", "most"),
    [
        ("type vxlan id 5 dev np-nic dstport 4789 remote 10.0.0.2", 1450),
        ("type vxlan id 5 dev np-nic dstport 4789 remote fd00::2", 1430),
    ],
)
def test_a_vxlan_over_a_device_whose_mtu_was_lowered(words: str, most: int, raise_lower: bool) -> None:
    _ip(f"link add np-vx {words}")
    _ip("link set np-vx up")
    assert found() == [], "the kernel has given it what there is room for"
    for name in ("np-far", "np-nic"):
        _ip(f"link set {name} mtu 1400")
    [large] = found()
    assert (large.status, large.found) == ("fail", f"np-vx has MTU {most}, np-nic below it 1400")
    raised, lowered = str(large.fix).split("; where a NIC cannot, ")
    if raise_lower:
        run(raised.replace("np-nic", "np-far").split())
        run(raised.split())
    else:
        run(lowered.split())
    assert [f for f in found() if f.status == "fail"] == []


def test_bridge_and_other_end() -> None:
    """The kernel gives a bridge the least MTU of its ports, until one is set."""
    _ip("link add np-br type bridge")
    try:
        _ip("link set np-nic master np-br")
        assert found() == []
        _ip("link set np-br mtu 9000")
        [bridge] = found()
        assert bridge.found == "bridge np-br has MTU 9000, its port np-nic 1500"
        run(str(bridge.fix).split())
        assert found() == []
        _ip("link set np-far mtu 9000")
        [end] = found()
        assert end.found == "np-far has MTU 9000, its other end np-nic 1500"
        run(str(end.fix).rpartition("cannot, ")[2].split())
        assert found() == []
    finally:
        _ip("link del np-br")

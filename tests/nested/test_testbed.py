"""The guest has what it is there for: the kernel's parts, and NICs with virtual functions."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyroute2 import IPRoute

from tests.lab import sandbox
from tests.lab.processes import run
from tests.nested import machine, nics
from tests.nested.nics import PF, WIRE, Nic

pytestmark = pytest.mark.nested

FAR_END = "far-end"


def ip(*words: str) -> str:
    return run(["ip", *words])


@contextmanager
def link(name: str, *words: str) -> Iterator[str]:
    ip("link", "add", "name", name, "type", *words)
    try:
        yield name
    finally:
        ip("link", "del", name)


def test_it_is_debians_kernel_in_a_guest_that_counts_as_a_sandbox() -> None:
    assert platform.release().startswith("6.12.")
    assert machine.inside() and sandbox.inside()
    assert len(os.sched_getaffinity(0)) == 1


def test_netlink_answers() -> None:
    with IPRoute() as netlink:
        assert netlink.link_lookup(ifname="lo", operstate="UNKNOWN")


def test_vlans() -> None:
    with link("dummy1", "dummy"):
        ip("link", "add", "link", "dummy1", "name", "dummy1.5", "type", "vlan", "id", "5")
        assert "vlan protocol 802.1Q id 5" in ip("-d", "link", "show", "dummy1.5")


def test_bonds() -> None:
    with link("bond1", "bond", "mode", "active-backup"):
        assert "bond mode active-backup" in ip("-d", "link", "show", "bond1")


def test_vlan_aware_bridges() -> None:
    with link("br1", "bridge", "vlan_filtering", "1", "vlan_default_pvid", "0"):
        with link("dummy1", "dummy"):
            ip("link", "set", "dummy1", "master", "br1")
            run(["bridge", "vlan", "add", "dev", "dummy1", "vid", "7", "pvid", "untagged"])
            shown = run(["bridge", "vlan", "show", "dev", "dummy1"])
            assert "7 PVID Egress Untagged" in shown


def test_tc_polices_and_redirects() -> None:
    with link("dummy1", "dummy"), link("ifb1", "ifb"):
        ip("link", "set", "ifb1", "up")
        run(["tc", "qdisc", "add", "dev", "dummy1", "clsact"])
        police = ["action", "police", "rate", "1mbit", "burst", "10k", "conform-exceed", "drop"]
        redirect = ["action", "mirred", "egress", "redirect", "dev", "ifb1"]
        added = ["tc", "filter", "add", "dev", "dummy1"]
        run([*added, "egress", "matchall", *police])
        run([*added, "ingress", "protocol", "ip", "flower", "ip_proto", "udp", *redirect])
        assert "rate 1Mbit" in run(["tc", "filter", "show", "dev", "dummy1", "egress"])
        assert "to device ifb1" in run(["tc", "filter", "show", "dev", "dummy1", "ingress"])


@pytest.mark.parametrize("path", ["/dev/net/tun", "/dev/vhost-net", "/dev/hugepages", "/dev/shm"])
def test_devices(path: str) -> None:
    assert Path(path).exists()


@pytest.mark.parametrize("name", ["vfio-pci", "openvswitch", "vduse", "vhost_vdpa", "igbvf"])
def test_modules_can_be_loaded(name: str) -> None:
    nics.modprobe(name)


def test_the_pf_and_the_wire_are_behind_an_iommu() -> None:
    assert (nics.device(PF.pci) / "sriov_totalvfs").read_text().strip() == "7"
    groups = {(nics.device(nic.pci) / "iommu_group").resolve() for nic in (PF, WIRE)}
    assert len(groups) == 2


def test_virtual_functions_are_made_and_given_back() -> None:
    with nics.virtual_functions(PF, 3) as functions:
        groups = {(nics.device(pci) / "iommu_group").resolve() for pci in functions}
        assert len(groups) == 3
    assert not nics.device(functions[0]).exists()


def test_a_virtual_function_goes_to_vfio() -> None:
    nics.modprobe("vfio-pci")
    with nics.virtual_functions(PF, 1) as (pci,):
        root = nics.device(pci)
        (root / "driver_override").write_text("vfio-pci")
        Path("/sys/bus/pci/drivers_probe").write_text(pci)
        assert (root / "driver").resolve().name == "vfio-pci"
        group = (root / "iommu_group").resolve().name
        assert Path("/dev/vfio", group).exists()


@contextmanager
def at_the_far_end() -> Iterator[None]:
    """The wire's interface in a network namespace of its own; back when it is removed."""
    ip("netns", "add", FAR_END)
    try:
        name = nics.interface(WIRE.pci)
        ip("link", "set", name, "netns", FAR_END)
        configured(WIRE, "10.9.0.2/24", name, "-n", FAR_END)
        yield
        ip("-n", FAR_END, "link", "set", name, "netns", "1")
    finally:
        ip("netns", "del", FAR_END)


def configured(nic: Nic, address: str, name: str, *where: str) -> None:
    assert nic.mac in ip(*where, "link", "show", name)
    ip(*where, "addr", "add", address, "dev", name)
    ip(*where, "link", "set", name, "up")


def test_the_pf_and_the_wire_ping_each_other() -> None:
    with at_the_far_end():
        name = nics.interface(PF.pci)
        configured(PF, "10.9.0.1/24", name)
        run(["ping", "-c", "3", "-i", "0.2", "-w", "20", "10.9.0.2"])
        ip("addr", "flush", "dev", name)

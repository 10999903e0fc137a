"""NICs and VFs read from whole /sys trees: several NICs and nodes, gaps, switchdev, the list."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from drivers.vf.inventory import Inventory, read_again, read_inventory
from drivers.vf.kernel import VfKernel
from drivers.vf.ledger import Use, list_vfs, unusable
from drivers.vf.options import By, PoolDevice, VfNumbers, parse_devices
from drivers.vf.usability import pool_findings, usability
from netplugin.host.vf_messages import NicLink, VfAttributes
from netplugin.host.vfs import Vfs
from tests.unit.drivers.vf.trees import SECOND, Nic, build, by_place

FIRST = Nic()


def links(*nics: Nic) -> dict[str, NicLink]:
    return {nic.interface: nic.link(index) for index, nic in enumerate(nics, 2)}


def read(root: Path, devices: list[str], *nics: Nic) -> Inventory:
    return read_inventory(root, parse_devices(devices), links(*nics))


def test_two_nics_on_two_nodes(tmp_path: Path) -> None:
    build(tmp_path, FIRST, SECOND)
    found = read(tmp_path, ["net1:eth0", "net2:0000:81:00.0"], FIRST, SECOND)
    assert {
        pf.address: (pf.name, pf.network, pf.numa_node, pf.driver, pf.total_vfs, pf.desired_vfs)
        for pf in found.pfs.values()
    } == {
        "0000:03:00.0": ("eth0", "net1", 0, "igb", 8, 7),
        "0000:81:00.0": ("eth1", "net2", 1, "mlx5_core", 8, 3),
    }
    assert len(found.vfs) == 10 and found.missing == ()
    vf = found.vfs["0000:03:10.3"]
    assert (vf.number, vf.pf, vf.numa_node, vf.driver) == (3, "0000:03:00.0", 0, "igbvf")
    assert vf.iommu_group == "13" and vf.driver_override is None and not vf.is_open
    assert vf.attributes == VfAttributes(spoofchk=True, trusted=False)


def test_numbers_may_have_gaps(tmp_path: Path) -> None:
    build(tmp_path, SECOND)
    found = read(tmp_path, ["net2:eth1"], SECOND)
    assert sorted(vf.number for vf in found.vfs.values()) == [0, 2, 5]
    assert by_place(found)["0000:81:00.0", 5].address == "0000:81:10.5"


def test_a_kind_stands_for_every_nic_of_it(tmp_path: Path) -> None:
    other = Nic(address="0000:04:00.0", interface="eth2", vf_bus="04", vfs=(0,))
    build(tmp_path, FIRST, other, SECOND)
    found = read(tmp_path, ["net1:8086:10c9"], FIRST, other, SECOND)
    assert list(found.pfs) == ["0000:03:00.0", "0000:04:00.0"]


def test_what_is_not_found_is_reported(tmp_path: Path) -> None:
    build(tmp_path, replace(FIRST, vfs=()))
    devices = ["net1:eth0", "net1:eth7", "net2:0000:99:00.0", "net2:1234:5678", "net1:0000:03:10.0"]
    found = read(tmp_path, devices, FIRST)
    assert [device.name for device in found.missing] == [
        "eth7",
        "0000:99:00.0",
        "1234:5678",
        "0000:03:10.0",
    ]
    ids = [finding.id for finding in pool_findings(found)]
    assert "vf-no-nic-eth7" in ids and "vf-none-0000:03:00.0" in ids


def test_a_nic_in_two_networks_is_ambiguous(tmp_path: Path) -> None:
    build(tmp_path, FIRST)
    devices = parse_devices(["net1:eth0", "net2:0000:03:00.0"])
    assert VfKernel(devices, tmp_path).ambiguous(devices) == {"0000:03:00.0": ("net1", "net2")}
    assert "several networks" in str(usability(tmp_path, devices).reason)


def test_switchdev_and_its_representors(tmp_path: Path) -> None:
    nic = replace(
        SECOND,
        switch_id="a1b2",
        port_name="p0",
        representors={0: "eth1_0", 2: "eth1_2", 5: "eth1_5"},
    )
    build(tmp_path, FIRST, nic)
    found = read(tmp_path, ["net1:eth0", "net2:0000:81:00.0"], FIRST, nic)
    assert (found.pfs["0000:03:00.0"].switchdev, found.pfs["0000:81:00.0"].switchdev) == (
        False,
        True,
    )
    assert found.pfs["0000:81:00.0"].name == "eth1"
    assert ["switchdev" in f.found for f in pool_findings(found)] == [True]


def test_one_nic_is_read_again_and_the_others_stay_as_they_were_seen(tmp_path: Path) -> None:
    """The look after a change: its NIC again, with one request to the kernel and no list of links."""
    build(tmp_path, FIRST, SECOND)
    reported = links(FIRST, SECOND)
    devices = parse_devices(["net1:eth0", "net2:eth1"])
    seen = read_inventory(tmp_path, devices, reported)
    for address in ("0000:03:10.1", "0000:81:10.2"):
        (tmp_path / "bus/pci/devices" / address / "driver").unlink()
    asked: list[int] = []
    changed = VfAttributes(mac="52:54:00:00:00:07", spoofchk=True, trusted=False)

    class Kernels(Vfs):
        def link(self, index: int) -> NicLink | None:
            asked.append(index)
            return FIRST.link(2, vfs={1: changed}) if index == 2 else None

    kernel = VfKernel(devices, tmp_path, Kernels(tmp_path))
    again = kernel.look_again(seen, ["0000:03:00.0"])
    assert asked == [2]
    assert again.vfs["0000:03:10.1"].attributes == changed
    assert again.vfs["0000:03:10.1"].driver is None and again.vfs["0000:03:10.1"].interfaces == ()
    assert again.vfs["0000:81:10.2"] == seen.vfs["0000:81:10.2"] and again.pfs.keys() == seen.pfs.keys()
    assert kernel.look_again(seen, ["0000:81:00.0"]).vfs["0000:81:10.2"].driver is None
    assert asked == [2, 3, 2, 3], "its interface has gone, so all is looked at"


def test_a_nic_whose_interface_is_elsewhere(tmp_path: Path) -> None:
    build(tmp_path, FIRST)
    found = read(tmp_path, ["net1:0000:03:00.0"])
    assert found.pfs["0000:03:00.0"].link is None
    assert all(vf.attributes is None for vf in found.vfs.values())


def test_an_open_vfio_device(tmp_path: Path) -> None:
    build(tmp_path, replace(FIRST, vf_driver="vfio-pci"))
    (tmp_path / "bus/pci/devices/0000:03:10.2/enable").write_text("0\n")
    (tmp_path / "bus/pci/devices/0000:03:10.2/driver_override").write_text("vfio-pci\n")
    found = read(tmp_path, ["net1:eth0"], FIRST)
    assert [vf.is_open for vf in found.vfs.values()].count(False) == 1
    assert not found.vfs["0000:03:10.2"].is_open
    assert found.vfs["0000:03:10.2"].driver_override == "vfio-pci"


def test_how_the_host_uses_a_vf(tmp_path: Path) -> None:
    """In another network namespace sysfs has no interface of it; there it may be a container's."""
    build(tmp_path, FIRST)
    up, enslaved, away = (tmp_path / f"bus/pci/devices/0000:03:10.{n}" for n in (1, 2, 3))
    (up / "net/eth0v1/flags").write_text("0x1003\n")
    (enslaved / "net/eth0v2/master").symlink_to("../../../virtual/net/br7")
    (away / "net/eth0v3").rename(tmp_path / "elsewhere")
    interface = tmp_path / "bus/pci/devices/0000:03:10.4/net/eth0v4"
    (interface / "addr_assign_type").write_text("1\n")
    (interface / "address").write_text("02:00:00:00:00:04\n")
    found = by_place(read(tmp_path, ["net1:eth0"], FIRST))
    used = {number: vf.host_use for (_, number), vf in found.items() if vf.host_use}
    assert {number: (use.how, use.end) for number, use in used.items()} == {
        1: ("its interface eth0v1 is up", "set eth0v1 down"),
        2: ("its interface eth0v2 is enslaved", "release eth0v2"),
        3: (
            "igbvf has it, and its interface is in another network namespace, or it has none",
            "bring the interface back, or unbind the VF from igbvf",
        ),
    }
    assert [(i.own_mac, i.mac) for i in found[FIRST.address, 4].interfaces] == [(True, "02:00:00:00:00:04")]
    vfs = Vfs(tmp_path)
    assert {n: vfs.host_use(f"0000:03:10.{n}") for n in used} == used, "one VF is seen as all are"
    kept = [n for n in used if vfs.host_use(f"0000:03:10.{n}", may_be_up=True)]
    assert sorted(kept) == [2, 3]
    assert [i.own_mac for i in found[FIRST.address, 5].interfaces] == [False]


def test_devices_that_share_an_iommu_group(tmp_path: Path) -> None:
    """Any device counts, but a bridge, which no driver of the host uses for DMA."""
    build(tmp_path, FIRST)
    devices = tmp_path / "bus/pci/devices"
    for address, kind in (("0000:00:1f.3", "0x040300"), ("0000:00:1c.0", "0x060400")):
        (devices / address).mkdir()
        (devices / address / "class").write_text(f"{kind}\n")
    for vf, other in ((1, "0000:00:1f.3"), (2, "0000:00:1c.0"), (3, "0000:03:10.4")):
        (devices / f"0000:03:10.{vf}/iommu_group/devices/{other}").touch()
    found = by_place(read(tmp_path, ["net1:eth0"], FIRST))
    assert {number: vf.group_mates for (_, number), vf in found.items() if vf.group_mates} == {
        1: ("0000:00:1f.3",),
        3: ("0000:03:10.4",),
    }


def test_the_representors_of_subfunctions_are_no_pf(tmp_path: Path) -> None:
    """They are interfaces of the PF's device too, and may come first by their names."""
    nic = replace(
        SECOND,
        switch_id="a1b2",
        port_name="p0",
        representors={0: "eth1_0"},
        others={"en3f0pf0sf4": "pf0sf4", "eth0pf": "c1pf0"},
    )
    build(tmp_path, nic)
    found = read(tmp_path, ["net2:0000:81:00.0", "net2:en3f0pf0sf4", "net2:eth1_0"], nic)
    [pf] = found.pfs.values()
    assert pf.name == "eth1"
    assert [device.name for device in found.missing] == ["en3f0pf0sf4", "eth1_0"]


@pytest.mark.parametrize(
    ("entries", "allowed"),
    [
        (["net1:eth0#2-4"], {2, 3, 4}),
        (["net1:eth0#^0+^5"], {1, 2, 3, 4, 6}),
        (["net1:eth0#0-4+6+^3"], {0, 1, 2, 4, 6}),
        (["net1:8086:10c9", "net1:eth0#3-9"], {3, 4, 5, 6}),
        (["net1:eth0#0-1", "net1:eth0#4-5"], {0, 1, 4, 5}),
        (["net1:eth0#0-3+^1", "net1:0000:03:00.0#1-5"], {0, 2, 3, 4, 5}),
        (["net1:eth0#^2", "net1:8086:10c9"], {0, 1, 3, 4, 5, 6}),
    ],
)
def test_some_of_a_nics_vfs_may_be_given_away(tmp_path: Path, entries: list[str], allowed: set[int]) -> None:
    build(tmp_path, FIRST)
    found = read(tmp_path, entries, FIRST)
    free = {vf.number for vf in found.vfs.values() if not unusable(found, vf)}
    assert free == allowed
    again = read_again(tmp_path, found, [FIRST.address], links(FIRST))
    assert {vf.number for vf in again.vfs.values() if not unusable(again, vf)} == allowed


def test_what_libvirt_has_to_write_back(tmp_path: Path) -> None:
    build(tmp_path / "sys", FIRST)
    state = tmp_path / "hostdevmgr"
    state.mkdir()
    (state / "eth0_vf3").touch()

    class Kernels(Vfs):
        def link(self, index: int) -> NicLink | None:
            return FIRST.link(index)

    sys = tmp_path / "sys"
    kernel = VfKernel(parse_devices(["net1:eth0"]), sys, Kernels(sys), libvirt_state=state)
    assert [vf.number for vf in kernel.look().vfs.values() if vf.saved_by_libvirt] == [3]


@pytest.mark.parametrize(
    ("entry", "device"),
    [
        ("physnet1:eth1", PoolDevice("physnet1", "eth1", By.INTERFACE)),
        ("physnet1:0000:03:00.A", None),
        ("physnet1:0000:3B:00.1", PoolDevice("physnet1", "0000:3b:00.1", By.ADDRESS)),
        ("physnet1:8086:10C9", PoolDevice("physnet1", "8086:10c9", By.KIND)),
        ("net1:eth1#8-63", PoolDevice("net1", "eth1", By.INTERFACE, VfNumbers(((8, 63),)))),
        (
            "net1:8086:10c9#0-3+7+^2",
            PoolDevice("net1", "8086:10c9", By.KIND, VfNumbers(((0, 3), (7, 7)), ((2, 2),))),
        ),
        ("physnet1:eth1#", None),
        ("physnet1:eth1#8-", None),
        ("physnet1:eth1#9-8", None),
        ("physnet1:", None),
        (":eth1", None),
        ("physnet1:a/b", None),
    ],
)
def test_the_list(entry: str, device: PoolDevice | None) -> None:
    if device is not None:
        assert parse_devices([entry, entry]) == (device,)
        return
    with pytest.raises(ValueError, match=r"\[sriov\] devices"):
        parse_devices([entry])


# -- can they be used ----------------------------------------------------------------------------


def test_usable(tmp_path: Path) -> None:
    build(tmp_path, FIRST)
    assert VfKernel(parse_devices(["net1:eth0"]), tmp_path).usability().usable


@pytest.mark.parametrize(
    ("devices", "nic", "vfio", "step", "fix"),
    [
        ([], FIRST, True, "devices", "set [sriov] devices"),
        (["net1:eth9"], FIRST, True, "devices", "correct"),
        (["net1:eth0"], replace(FIRST, vfs=()), True, "vfs", "echo N > /sys/bus/pci/devices/0000:03:00.0/"),
        (["net1:eth0"], FIRST, False, "vfio", "modprobe vfio-pci"),
    ],
)
def test_unusable_says_the_reason_and_the_fix(
    tmp_path: Path, devices: list[str], nic: Nic, vfio: bool, step: str, fix: str
) -> None:
    build(tmp_path, nic, vfio=vfio)
    found = usability(tmp_path, parse_devices(devices))
    assert not found.usable and found.step == step and fix in str(found.fix)


def test_without_an_iommu(tmp_path: Path) -> None:
    build(tmp_path, FIRST)
    for group in (tmp_path / "kernel/iommu_groups").iterdir():
        shutil.rmtree(group)
    found = usability(tmp_path, parse_devices(["net1:eth0"]))
    assert found.step == "iommu" and "intel_iommu=on" in str(found.fix)


def test_dpdk_on_mlx5_needs_neither_an_iommu_nor_vfio(tmp_path: Path) -> None:
    """DPDK's guide to mlx5: it works by the kernel's verbs. A VM has such a VF by vfio, as any."""
    build(tmp_path, SECOND, vfio=False)
    for group in (tmp_path / "kernel/iommu_groups").iterdir():
        shutil.rmtree(group)
    for number in SECOND.vfs:
        (tmp_path / "bus/pci/devices" / SECOND.vf_address(number) / "iommu_group").unlink()
    devices = parse_devices(["net2:eth1"])
    assert usability(tmp_path, devices, for_dpdk=True).usable
    assert usability(tmp_path, devices).step == "iommu"
    found = read(tmp_path, ["net2:eth1"], SECOND)
    for vf in found.vfs.values():
        assert unusable(found, vf, Use.RELAY) is None
        assert unusable(found, vf) == "it has no IOMMU group"
    assert {(i.state, i.reason) for i in list_vfs(found, {}, {})} == {
        ("available", "it has no IOMMU group: for the backend vdpa alone")
    }
    others = replace(SECOND, driver="ice", vf_driver="iavf")
    build(tmp_path / "others", others, vfio=False)
    assert usability(tmp_path / "others", devices, for_dpdk=True).step == "vfio"

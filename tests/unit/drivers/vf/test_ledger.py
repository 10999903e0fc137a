"""Which VF a port gets, by properties; what claims remember; and where every VF stands."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivers.vf.inventory import Inventory, Pf, Vf, read_inventory
from drivers.vf.ledger import Use, choose, claim_vf, list_vfs
from drivers.vf.memory import ANY_DRIVER, LostVf, Memory, locate, new_claim
from drivers.vf.options import parse_devices
from netplugin.api.errors import (
    BackendUnavailable,
    CapacityExhausted,
    Conflict,
    InvalidRequest,
    NetpluginError,
)
from netplugin.api.models import PortSpec
from netplugin.backend import NOBODY, Claim, Intent
from netplugin.host.vf_messages import NicLink, VfAttributes
from netplugin.host.vfs import HostInterface
from tests.unit.drivers.vf.trees import Nic, build, by_place

MAC = "52:54:00:12:34:56"


def make_pf(number: int = 3, network: str = "net1", node: int = 0, **link: Any) -> Pf:
    reported = {
        "mtu": 1500,
        "up": True,
        "carrier": True,
        "permanent_mac": f"52:54:00:00:00:{number:02x}",
    }
    nic = NicLink(number, f"eth{number}", **{**reported, **link})  # type: ignore[arg-type]
    return Pf(f"0000:{number:02x}:00.0", network, "igb", node, 8, 8, nic)


def make_vf(pf: Pf, number: int, **fields: Any) -> Vf:
    address = f"{pf.address[:8]}{0x10 + number // 8:02x}.{number % 8}"
    has = {
        "iommu_group": address,
        "driver": "igbvf",
        "driver_override": None,
        "interfaces": (HostInterface(f"{pf.address}v{number}", up=False, enslaved=False),),
        "attributes": VfAttributes(spoofchk=True),
    }
    return Vf(address, number, pf.address, pf.numa_node, **{**has, **fields})


def pool(*pfs: Pf, vfs: int = 7, **fields: Any) -> Inventory:
    found = [make_vf(pf, number, **fields) for pf in pfs for number in range(vfs)]
    return Inventory({pf.address: pf for pf in pfs}, {vf.address: vf for vf in found})


def spec(**fields: Any) -> PortSpec:
    values = {
        "vm_id": "vm",
        "mac": MAC,
        "backend": "sriov",
        "network": {"type": "flat", "physical_network": "net1"},
        **fields,
    }
    return PortSpec.model_validate(values)


# -- the choice ----------------------------------------------------------------------------------

specs = st.builds(
    spec,
    numa_node=st.none() | st.integers(0, 2),
    network=st.sampled_from(
        [{"type": "flat", "physical_network": n, "mtu": m} for n in ("net1", "net2") for m in (1500, 9000)]
    ),
    vf=st.fixed_dictionaries(
        {"pci_address": st.none() | st.sampled_from(["0000:03:10.1", "0000:04:10.6", "0000:09:10.0"])}
    ),
)
pools = st.builds(
    lambda *pfs: pool(*pfs, vfs=3),
    st.builds(make_pf, st.just(3), mtu=st.sampled_from([1500, 9000]), up=st.booleans()),
    st.builds(make_pf, st.just(4), node=st.integers(0, 1), carrier=st.booleans()),
    st.builds(make_pf, st.just(5), network=st.just("net2"), node=st.just(1)),
)


@given(inventory=pools, asked=st.lists(specs, max_size=12))
def test_a_vf_is_never_given_twice_and_always_as_asked(inventory: Inventory, asked: list[PortSpec]) -> None:
    taken: dict[str, str] = {}
    for number, desired in enumerate(asked):
        try:
            vf = choose(inventory, desired, taken)
        except (CapacityExhausted, Conflict, InvalidRequest, BackendUnavailable) as refused:
            assert refused.detail and refused.step
            continue
        pf = inventory.pf_of(vf)
        assert vf.address not in taken
        assert desired.vf.pci_address in (None, vf.address)
        assert desired.numa_node in (None, vf.numa_node)
        assert pf.network == desired.network.physical_network
        assert pf.link is not None and pf.link.up and pf.link.mtu >= desired.network.mtu
        taken[vf.address] = f"p{number}"


@given(count=st.integers(1, 21))
def test_ports_are_balanced_over_the_nics(count: int) -> None:
    inventory, taken = pool(make_pf(3), make_pf(4), make_pf(5)), dict[str, str]()
    for number in range(count):
        taken[choose(inventory, spec(), taken).address] = f"p{number}"
    used = Counter(inventory.vfs[address].pf for address in taken)
    assert max(used.values()) - min(used.get(pf, 0) for pf in inventory.pfs) <= 1


def test_the_vfs_of_one_vm_are_on_different_nics() -> None:
    inventory = pool(make_pf(3), make_pf(4), make_pf(5, carrier=False))
    taken = {Claim("vf", f"0000:04:10.{n}"): f"other{n}" for n in range(3)}
    for port_id, desired in (("a", spec()), ("b", spec()), ("c", spec(vm_id="vm2"))):
        taken[claim_vf(inventory, Intent(port_id, desired), taken)] = port_id
    had = {port_id: inventory.vfs[claim.key].pf for claim, port_id in taken.items()}
    assert (had["a"], had["b"]) == ("0000:03:00.0", "0000:04:00.0"), "though it has more in use"
    assert had["c"] == "0000:03:00.0"
    third = claim_vf(inventory, Intent("d", spec()), taken)
    assert inventory.vfs[third.key].pf == "0000:03:00.0", "one of them again, as 5 has no carrier"


def test_the_lowest_number_of_the_least_used_nic() -> None:
    inventory = pool(make_pf(3), make_pf(4))
    assert choose(inventory, spec(), {}).address == "0000:03:10.0"
    assert choose(inventory, spec(), {"0000:03:10.5": "a"}).address == "0000:04:10.0"


def test_a_node_is_a_requirement_that_the_error_names() -> None:
    inventory = pool(make_pf(3, node=0), make_pf(4, node=1), vfs=1)
    assert choose(inventory, spec(numa_node=1), {}).numa_node == 1
    for node, taken in ((1, {"0000:04:10.0": "a"}), (2, {})):
        with pytest.raises(CapacityExhausted, match=f"NUMA node {node}"):
            choose(inventory, spec(numa_node=node), taken)


def test_a_nic_without_a_carrier_is_taken_last_and_one_that_is_down_never() -> None:
    inventory = pool(make_pf(3, carrier=False), make_pf(4), make_pf(5, up=False), vfs=1)
    first = choose(inventory, spec(), {})
    assert first.pf == "0000:04:00.0"
    second = choose(inventory, spec(), {first.address: "a"})
    assert second.pf == "0000:03:00.0"
    with pytest.raises(BackendUnavailable, match="eth5 of net1 is down") as refused:
        choose(inventory, spec(), {first.address: "a", second.address: "b"})
    assert refused.value.fix == "ip link set eth5 up"


@pytest.mark.parametrize(
    ("pf", "words"),
    [
        (make_pf(3, mtu=1400), "eth3 of net1 has MTU 1400, and the network wants 1500"),
        (replace(make_pf(3), switchdev=True), "switchdev"),
        (replace(make_pf(3), link=None), "no network interface"),
    ],
)
def test_a_nic_that_frames_cannot_take_names_the_hop(pf: Pf, words: str) -> None:
    with pytest.raises(NetpluginError, match=words) as refused:
        choose(pool(pf), spec(), {})
    assert refused.value.fix


@pytest.mark.parametrize(
    "fields",
    [
        {"iommu_group": None},
        {"group_mates": ("0000:00:1f.3",)},
        {"driver": "vfio-pci", "is_open": True},
        {"driver": "igb_uio"},
        {"saved_by_libvirt": True},
        {"interfaces": ()},
        {"interfaces": (HostInterface("vf0", up=True, enslaved=False),)},
        {"interfaces": (HostInterface("vf0", up=False, enslaved=True),)},
    ],
)
def test_a_vf_in_use_by_another_is_left_alone(fields: dict[str, Any]) -> None:
    inventory = pool(make_pf(3), vfs=2, **fields)
    with pytest.raises(CapacityExhausted, match="cannot be used"):
        choose(inventory, spec(), {})
    with pytest.raises(Conflict, match="cannot be used"):
        choose(inventory, spec(vf={"pci_address": "0000:03:10.1"}), {})
    assert {info.state for info in list_vfs(inventory, {}, {})} == {"unusable"}


@pytest.mark.parametrize("fields", [{"iommu_group": None}, {"group_mates": ("0000:00:1f.3",)}])
def test_the_reason_of_an_empty_pool_is_that_of_who_uses_it(fields: dict[str, Any]) -> None:
    """DPDK needs no IOMMU group for a VF that keeps its kernel driver, but vfio does."""
    used = (HostInterface("vf0", up=True, enslaved=False),)
    inventory = pool(make_pf(3), vfs=2, driver="mlx5_core", interfaces=used, **fields)
    for use in (Use.VM, Use.RELAY):
        with pytest.raises(CapacityExhausted, match=r"0000:03:10\.0 cannot be used: ") as refused:
            choose(inventory, spec(), {}, use)
        assert ("IOMMU group" in refused.value.detail) == (use is Use.VM)
        assert ("vf0" in refused.value.detail) == (use is Use.RELAY)


def test_a_named_vf_is_that_one_or_none() -> None:
    inventory = pool(make_pf(3), make_pf(4, "net2"))
    named = spec(vf={"pci_address": "0000:03:10.4"})
    assert choose(inventory, named, {}).number == 4
    for taken, words in (
        ({"0000:03:10.4": "p9"}, "port p9's"),
        ({"0000:03:10.4": NOBODY}, "quarantined"),
    ):
        with pytest.raises(Conflict, match=words):
            choose(inventory, named, taken)
    with pytest.raises(Conflict, match="NUMA node 0, and node 1"):
        choose(inventory, spec(vf={"pci_address": "0000:03:10.4"}, numa_node=1), {})
    for address in "0000:04:10.0", "0000:03:11.7":
        with pytest.raises(InvalidRequest, match=r"vf\.pci_address") as refused:
            choose(inventory, spec(vf={"pci_address": address}), {})
        assert refused.value.errors[0].field == "vf.pci_address"


def test_a_port_keeps_its_vf_and_cannot_have_another() -> None:
    inventory = pool(make_pf(3), make_pf(4, "net2"))
    claim = claim_vf(inventory, Intent("p", spec()), {})
    kept = claim_vf(inventory, Intent("p", spec(vf={"trusted": True}), (claim,)), {claim: "p"})
    assert kept is claim
    for other in (
        spec(vf={"pci_address": "0000:03:10.5"}),
        spec(network={"type": "flat", "physical_network": "net2"}),
    ):
        with pytest.raises(Conflict, match=f"has VF {claim.key}"):
            claim_vf(inventory, Intent("p", other, (claim,)), {claim: "p"})


def test_after_a_lost_store_the_vf_with_its_mac_is_the_ports() -> None:
    inventory = pool(make_pf(3))
    ours = make_vf(
        make_pf(3),
        5,
        driver="vfio-pci",
        is_open=True,
        driver_override="vfio-pci",
        attributes=VfAttributes(spec().mac, 100, 0, False, True),
    )
    inventory = replace(inventory, vfs={**inventory.vfs, ours.address: ours})
    claim = claim_vf(inventory, Intent("p", spec()), {})
    assert claim.key == ours.address
    original = Memory.of(claim).original
    assert (original.driver, original.driver_override) == (ANY_DRIVER, None)
    assert original.attributes == VfAttributes(spoofchk=True, trusted=False)


# -- what is remembered --------------------------------------------------------------------------


def test_a_claim_remembers_how_the_vf_was_through_the_store() -> None:
    inventory = pool(make_pf(3), attributes=VfAttributes("02:00:00:00:00:09", 7, 1, None, True))
    vf = inventory.vfs["0000:03:10.2"]
    claim = new_claim(inventory, vf, MAC, adopted=False)
    stored = Claim(claim.kind, claim.key, json.loads(json.dumps(claim.memory)))
    memory = Memory.of(stored)
    assert memory.original.attributes == vf.attributes and memory.original.driver == "igbvf"
    assert (memory.pf_name, memory.number, memory.numa_node) == ("eth3", 2, 0)
    assert stored == claim == Claim("vf", claim.key), "what is remembered is no part of what it is"


def claimed(root: Path, nic: Nic, number: int = 2) -> Claim:
    inventory = read_inventory(root, parse_devices(["net1:8086:10c9"]), {nic.interface: nic.link()})
    vf = by_place(inventory)[nic.address, number]
    return new_claim(inventory, vf, MAC, adopted=False)


def after_reboot(root: Path, *nics: Nic) -> Inventory:
    build(root, *nics)
    links = {nic.interface: nic.link() for nic in nics}
    return read_inventory(root, parse_devices(["net1:8086:10c9"]), links)


def test_renumbered_a_vf_is_recognised_and_not_followed(tmp_path: Path) -> None:
    """The VM's XML names the old address: a port that moved silently would not be the VM's."""
    before, nic = Nic(), Nic(address="0000:04:00.0", vf_bus="04")
    claim = claimed(build(tmp_path / "before", before), before)
    lost = locate(after_reboot(tmp_path / "after", nic), claim)
    assert isinstance(lost, LostVf) and lost.moved
    assert lost.reason == "0000:03:10.2 was VF 2 of eth0, which is now 0000:04:10.2"


def test_an_address_that_another_nic_has_now_is_not_ours(tmp_path: Path) -> None:
    before = Nic()
    claim = claimed(build(tmp_path / "before", before), before)
    moved = Nic(address="0000:04:00.0", interface="eth1", vf_bus="04")
    new = Nic(mac="52:54:00:00:bb:01")
    inventory = after_reboot(tmp_path / "after", new, moved)
    lost = locate(inventory, claim)
    assert isinstance(lost, LostVf) and lost.moved
    assert lost.reason == "0000:03:10.2 was VF 2 of eth0, which is now 0000:04:10.2"
    [info] = [i for i in list_vfs(inventory, {claim: "p"}, {}) if i.pci_address == claim.key]
    assert (info.state, info.port_id) == ("stale", "p")


def test_a_nic_that_was_renamed_is_the_same(tmp_path: Path) -> None:
    before = Nic()
    claim = claimed(build(tmp_path / "before", before), before)
    vf = locate(after_reboot(tmp_path / "after", Nic(interface="enp3s0")), claim)
    assert not isinstance(vf, LostVf) and vf.address == claim.key


def test_a_vf_that_its_nic_has_lost_is_reported(tmp_path: Path) -> None:
    before = Nic()
    claim = claimed(build(tmp_path / "before", before), before)
    inventory = after_reboot(tmp_path / "after", Nic(vfs=()))
    lost = locate(inventory, claim)
    assert isinstance(lost, LostVf) and not lost.moved
    assert lost.reason == (
        "0000:03:10.2, VF 2 of eth0, is gone: eth0 has 0 VFs (sriov_numvfs of 0000:03:00.0)"
    )
    [info] = list_vfs(inventory, {claim: "p"}, {})
    assert (info.pci_address, info.state, info.port_id) == (claim.key, "stale", "p")


# -- where every VF stands -----------------------------------------------------------------------


def test_every_vf_is_listed() -> None:
    inventory = pool(make_pf(3), vfs=4)
    busy = replace(inventory.vfs["0000:03:10.1"], driver="vfio-pci", is_open=True)
    inventory = replace(inventory, vfs={**inventory.vfs, busy.address: busy})
    taken = {
        new_claim(inventory, inventory.vfs["0000:03:10.0"], MAC, adopted=False): "a",
        new_claim(inventory, busy, MAC, adopted=False): "b",
        Claim("vf", "0000:03:10.2"): NOBODY,
    }
    unfit = {Claim("vf", "0000:03:10.2"): "it does not take its MAC"}
    found = [(i.state, i.port_id, i.reason) for i in list_vfs(inventory, taken, unfit)]
    assert found == [
        ("claimed", "a", None),
        ("allocated", "b", None),
        ("quarantined", None, "it does not take its MAC"),
        ("available", None, None),
    ]
    assert list_vfs(inventory, taken, unfit)[3].model_dump() == {
        "pci_address": "0000:03:10.3",
        "pf": "eth3",
        "vf_index": 3,
        "numa_node": 0,
        "physical_network": "net1",
        "driver": "igbvf",
        "state": "available",
        "port_id": None,
        "reason": None,
        "max_queues": 2,
        "left_out": False,
    }

"""Native mode on a whole /sys tree: a NIC in switchdev mode with representors, next to one that is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from drivers.vdpa.driver import Vdpa
from drivers.vdpa.model import NATIVE_TYPE, Mode, VdpaObservation, mode_of
from drivers.vf.inventory import Inventory, read_inventory
from drivers.vf.kernel import VfKernel
from drivers.vf.options import parse_devices
from netplugin import options
from netplugin.api.errors import CapacityExhausted, Conflict
from netplugin.backend import Claim, Intent
from tests.unit.drivers.sriov.model import Model
from tests.unit.drivers.vdpa.world import NATIVE_ROOT, RELAY_ROOT, ModelSwitch, vdpa_spec
from tests.unit.drivers.vf.trees import SECOND, Nic, build

PLAIN = Nic()
SWITCHDEV = replace(
    SECOND,
    switch_id="a1b2",
    port_name="p0",
    representors={0: "eth1_0", 2: "eth1_2", 5: "eth1_5"},
)


def on(tree: Path, *, native: bool) -> tuple[Vdpa, Inventory]:
    devices = parse_devices(["net1:0000:81:00.0", "net2:eth0"])
    links = {nic.interface: nic.link(index) for index, nic in enumerate((PLAIN, SWITCHDEV), 2)}
    inventory = read_inventory(build(tree, PLAIN, SWITCHDEV), devices, links)
    switch = ModelSwitch(Model())
    switch.reported = NATIVE_ROOT if native else RELAY_ROOT
    return Vdpa(options.load([]), None, kernel=VfKernel(devices, tree), switch=switch), inventory


def test_the_representor_is_that_of_the_vf_whatever_gaps_there_are(tmp_path: Path) -> None:
    driver, inventory = on(tmp_path, native=True)
    taken: dict[Claim, str] = {}
    asked: list[str] = []
    for number in range(3):
        intent = Intent(f"p{number}", vdpa_spec(number + 1))
        claims = driver.claims(intent, VdpaObservation({}, inventory=inventory), taken)
        taken |= dict.fromkeys(claims, intent.port_id)
        intent = replace(intent, claims=claims)
        assert mode_of(intent) is Mode.NATIVE
        [port] = [
            change.port
            for change in driver.plan([intent], VdpaObservation({}, inventory=inventory)).changes
            if type(change).__name__ == "AddPort"
        ]
        assert port.type == NATIVE_TYPE
        assert port.options["vdpa-accelerator-devargs"] == claims[0].key
        asked.append(port.options["dpdk-devargs"])
    assert asked == [f"0000:81:00.0,representor=[{number}]" for number in (0, 2, 5)]
    with pytest.raises(CapacityExhausted):
        driver.claims(Intent("p3", vdpa_spec(4)), VdpaObservation({}, inventory=inventory), taken)


@pytest.mark.parametrize(("native", "network"), [(True, "net2"), (False, "net1")])
def test_a_nic_is_for_one_mode_or_the_other(tmp_path: Path, native: bool, network: str) -> None:
    driver, inventory = on(tmp_path, native=native)
    spec = vdpa_spec(1, network={"physical_network": network})
    with pytest.raises(Conflict, match="switchdev"):
        driver.claims(Intent("p", spec), VdpaObservation({}, inventory=inventory), {})


def test_the_list_names_the_user_of_each_vf_of_a_switch(tmp_path: Path) -> None:
    driver, inventory = on(tmp_path, native=True)
    reported = driver.vfs(VdpaObservation({}, inventory=inventory), {}, {})
    assert {info.state for info in reported} == {"available"}
    assert {info.pf for info in reported if "native mode" in (info.reason or "")} == {"eth1"}
    ids = [f.id for f in driver.findings((), VdpaObservation({}, inventory=inventory))]
    assert ids == ["vf-nic-0000:03:00.0"], "the NIC that native mode cannot use"

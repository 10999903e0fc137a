"""A VM with a VF migrates by its virtio NIC: where the NIC's switch has its MAC at each step.

One agent is the destination first and the source then.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.lab.agent import PrivateAgent
from tests.lab.namespaces import within
from tests.lab.processes import run, wait_for
from tests.lab.traffic_taps import TapVm
from tests.nested.test_sriov import agent, delete, make_spec, one_agent, put, vm, with_libvirt
from tests.nested.vfs import DEADLINE_S, FAR, NO_MAC, driver, functions, ping, vf_info, whole_state

__all__ = ["agent", "one_agent"]
pytestmark = [pytest.mark.nested, pytest.mark.long, pytest.mark.timeout(600)]

SPEC = make_spec(vf={"teaming": True})
ADDRESS = "10.9.0.5"


def step(agent: PrivateAgent, phase: str, status: int = 200, **fields: Any) -> Any:
    answer, body = agent.call("POST", "/v1/ports/nic1:migrate", {"phase": phase, **fields})
    assert answer == status, body
    return body


def test_a_vm_with_a_vf_migrates_by_its_virtio_nic(
    pf: str, agent: PrivateAgent, far: str, tmp_path: Path
) -> None:
    before, mac = whole_state(pf, functions()), SPEC["mac"]
    run(within(FAR, ["ip", "neigh", "replace", ADDRESS, "lladdr", mac, "dev", "wire.100"]))
    port = step(agent, "prepare", port=SPEC)
    address, standby = port["binding"]["pci_address"], port["binding"]["standby_port_id"]
    assert port["migration"]["phase"] == "prepared" and "hostdev" not in port["binding"]["interface_xml"]
    assert driver(address) == "vfio-pci" and vf_info(pf)[0]["address"] == NO_MAC
    tap = agent.get(f"/v1/ports/{standby}")[1]["binding"]["device"]
    with TapVm("vm", None, tap, mac, ADDRESS):
        assert not ping(ADDRESS), "it is closed"
        step(agent, "activate")
        wait_for(lambda: ping(ADDRESS), DEADLINE_S, "the virtio NIC has the VM's frames, the VF has none")
        assert "hostdev" in step(agent, "commit")["binding"]["interface_xml"]
        with with_libvirt(pf, mac), vm(address, tmp_path / "vm.log"):
            refused = step(agent, "leave", 409)
            assert f"VF {address} is in use" in refused["detail"]
        wait_for(lambda: vf_info(pf)[0]["address"] == NO_MAC, DEADLINE_S, "the NIC has forgotten its MAC")
        wait_for(lambda: ping(ADDRESS), DEADLINE_S, "the virtio NIC has its frames again")
        assert step(agent, "leave")["migration"]["phase"] == "left"
        assert not ping(ADDRESS) and vf_info(pf)[0]["address"] == NO_MAC
        step(agent, "abort")
        wait_for(lambda: ping(ADDRESS), DEADLINE_S, "it is open again")
        step(agent, "leave")
    step(agent, "commit", 204)
    assert whole_state(pf, functions()) == before and agent.get("/v1/ports")[1] == []


def test_a_vm_does_not_leave_for_a_host_without_a_free_vf(pf: str, agent: PrivateAgent) -> None:
    taken = [f"nic{number}" for number in range(2, 9)]
    for number, port_id in enumerate(taken, start=2):
        put(agent, port_id, make_spec(number))
    before = whole_state(pf, functions())
    refused = step(agent, "prepare", 507, port=SPEC)
    assert refused["code"] == "capacity_exhausted"
    assert sorted(port["port_id"] for port in agent.get("/v1/ports")[1]) == taken
    assert whole_state(pf, functions()) == before
    for port_id in taken:
        delete(agent, port_id)

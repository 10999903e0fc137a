"""A NIC is judged by its driver and PCI id: for DPDK, for VFs, and by what the kernel answers."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from netplugin.api.errors import HostError, InvalidRequest
from netplugin.host.nic_errors import OF_BINDING, OF_VF_NUMBER
from netplugin.host.nic_models import KEPT_BY_DPDK, MODELS, model_of
from netplugin.host.vfs import VfBusy, VfInvalid, _error
from netplugin.tuning.applying.apply import StepOutcome
from netplugin.tuning.applying.kernel import VfCounts
from netplugin.tuning.intent import HostIntent
from netplugin.tuning.planning.network import chosen_nics
from netplugin.tuning.planning.plan import make_plan
from netplugin.tuning.read import read_facts
from netplugin.tuning.root import Unknown
from netplugin.tuning.steps import VfCount
from tests.unit.tuning.fake_kernel import NIC, NUMVFS
from tests.unit.tuning.fake_machine import FakeMachine
from tests.unit.tuning.machines import Machine, MemoryRoot, load
from tests.unit.tuning.test_apply_vfs import only_vfs
from tests.unit.tuning.test_checks import facts_from, found, scene
from tests.unit.tuning.trees import tree

MLX5, E810, I350 = ("0000:3b:00.0", "15B3:101D"), ("0000:3b:00.1", "8086:1592"), ("0000:1a:00.0", "8086:1521")


def nic(driver: str, place: tuple[str, str] = E810, name: str | None = "ens1", **more: Any) -> dict[str, Any]:
    address, pci_id = place
    made = {
        "address": address,
        "id": pci_id,
        "node": 0,
        "driver": driver,
        "mtu": 1500,
        "speed": 25000,
        "queues": 1,
    }
    return made | ({} if name is None else {"interface": name}) | more


def machine(*nics: dict[str, Any], **more: Any) -> Machine:
    return replace(load("published"), nics=list(nics), **more)


def judged(*nics: dict[str, Any], **intent: Any) -> list[tuple[str, str]]:
    return [(f.status, f.found) for f in found(scene(machine(*nics), **intent), "nic-model")]


# -- for DPDK --------------------------------------------------------------------------------------


@pytest.mark.parametrize("driver", ["vfio-pci", "uio_pci_generic", "igb_uio", "mlx5_vfio_pci"])
@pytest.mark.parametrize("pci_id", ["15B3:101D", "15B3:1003", "1414:00BA"])
def test_a_nic_that_stays_with_its_driver_is_taken_from_it(driver: str, pci_id: str) -> None:
    taken = nic(driver, ("0000:3b:00.0", pci_id), None)
    words = f"0000:3b:00.0 is bound to {driver}, and DPDK uses it with the NIC's own kernel driver"
    assert judged(taken) == [("fail", words)]
    [finding] = found(scene(machine(taken), pmd_cores=1, nics=(MLX5[0],)), "nic-model")
    assert finding.status == "fail" and finding.fix == "driverctl unset-override 0000:3b:00.0"
    assert judged(taken, nic("ice"), pmd_cores=1) == [("fail", words), judged(nic("ice"), pmd_cores=1)[0]]
    # A VM may have it, if the operator names others for DPDK.
    assert judged(taken, nic("ice"), pmd_cores=1, nics=("ens1",))[0] == ("warn", words)


@pytest.mark.parametrize(
    ("driver", "pci_id", "status", "words"),
    [
        ("mlx5_core", "15B3:101D", "ok", "DPDK needs rdma-core"),
        ("mlx4_core", "15B3:1003", "ok", "DPDK needs rdma-core"),
        ("ice", "8086:1592", "ok", "DPDK needs the DDP package"),
        ("ena", "1D0F:EC20", "ok", "write combining"),
        ("virtio-pci", "1AF4:1041", "ok", "enable_unsafe_noiommu_mode=1"),
        ("vfio-pci", "15AD:07B0", "ok", "enable_unsafe_noiommu_mode=1"),
        ("tg3", "14E4:165F", "fail", "DPDK has no driver for it"),
        ("be2net", "19A2:0710", "fail", "DPDK has no driver for it"),
        ("bnx2", "14E4:1639", "fail", "DPDK has no driver for it"),
        ("", "15B3:101D", "fail", "is bound to no driver, and DPDK uses it with the NIC's own"),
        ("odd", "dead:beef", "warn", "is not known here"),
        ("", "8086:1592", "warn", "has no driver, and whether DPDK has a driver"),
    ],
)
def test_a_nic_of_the_plan(driver: str, pci_id: str, status: str, words: str) -> None:
    """As it is named: a plan that names none takes no NIC that DPDK cannot use."""
    seen = judged(nic(driver, ("0000:3b:00.1", pci_id)), pmd_cores=1, nics=("0000:3b:00.1",))
    assert len(seen) == 1 and seen[0][0] == status and words in seen[0][1]


@pytest.mark.parametrize(
    "driver", ["igb", "ixgbe", "i40e", "bnxt_en", "idpf", "sfc", "vfio-pci", "uio_pci_generic"]
)
def test_a_nic_that_needs_nothing_has_no_finding(driver: str) -> None:
    assert judged(nic(driver, I350), pmd_cores=1) == []
    assert judged(nic("tg3", I350)) == [], "not of a NIC that nobody wants for DPDK"


def test_what_the_table_has_of_a_nic_by_id_it_has_of_its_driver() -> None:
    assert {"mlx4_core", "mlx5_core", "mana"} == KEPT_BY_DPDK
    for name, model in MODELS.items():
        assert model_of(name, "15b3:101d") is model
        assert all(model_of("vfio-pci", pci_id) is model for pci_id in model.ids)
    assert [model_of(None).vf.queues, model_of("odd").vf.tags] == [1, ""]


# -- chosen for the plan ---------------------------------------------------------------------------


def chosen(made: Machine, **intent: Any) -> list[str]:
    facts = facts_from(made)
    return [nic.address[5:] for nic in chosen_nics(facts, HostIntent(pmd_cores=1, **intent))]


@pytest.mark.parametrize("family", ["routes", "routes6"])
def test_the_nic_of_the_default_route_is_left_while_there_is_another(family: str) -> None:
    fast, slow = nic("ice", E810, "fast"), nic("igb", I350, "slow", speed=1000)
    assert chosen(machine(fast, slow)) == ["3b:00.1"]
    assert chosen(machine(fast, slow, **{family: ["fast"]})) == ["1a:00.0"]
    assert chosen(machine(fast, slow, **{family: ["slow"]})) == ["3b:00.1"]
    assert chosen(machine(fast, **{family: ["fast"]})) == ["3b:00.1"], "there is no other"
    assert chosen(machine(fast, slow, **{family: ["fast"]}), nics=("fast",)) == ["3b:00.1"], "it is named"
    bond = {"bond0": {"mode": "802.3ad 4", "policy": "layer2 0", "mtu": 1500}}
    below = machine(fast | {"master": "bond0"}, slow, bonds=bond, **{family: ["bond0"]})
    assert chosen(below) == ["1a:00.0"], "through a bond"


def test_no_nic_is_chosen_that_dpdk_cannot_use() -> None:
    card = nic("ice", E810, "fast", speed=1000)
    assert chosen(machine(card, nic("tg3", I350, "slow", speed=10000))) == ["3b:00.1"]
    assert chosen(machine(card, nic("vfio-pci", MLX5, None))) == ["3b:00.1"]
    assert chosen(machine(card, nic("vfio-pci", I350, None))) == ["1a:00.0"], "it is bound for DPDK"
    assert chosen(machine(nic("tg3", I350, "slow"))) == ["1a:00.0"], "the check says what is wrong"


@pytest.mark.parametrize("path", ["/proc/net/route", "/proc/net/ipv6_route"])
def test_routes_that_cannot_be_read_are_unknown_and_change_no_choice(path: str) -> None:
    made = machine(nic("ice", E810, "fast"), nic("igb", I350, "slow", speed=1000), routes=["fast"])
    facts = read_facts(MemoryRoot(tree(made), {path: errno.EACCES}))
    assert isinstance(facts.network.nics, tuple)
    assert all(isinstance(nic.default_route, Unknown) for nic in facts.network.nics)
    assert [u.path for u in facts.unknown()] == [path]
    assert [n.address for n in chosen_nics(facts, HostIntent(pmd_cores=1))] == [E810[0]]


# -- for VFs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("driver", "more", "words", "fix"),
    [
        (
            "virtio-pci",
            {},
            r"no virtual functions: a hypervisor made this NIC \(virtio-pci\)",
            "gives it a PF",
        ),
        ("vmxnet3", {}, "a hypervisor made this NIC", "gives it a PF"),
        ("ena", {}, "a hypervisor made this NIC", "gives it a PF"),
        ("iavf", {}, "it is a virtual function itself", "gives it a PF"),
        ("igbvf", {}, "it is a virtual function itself", "gives it a PF"),
        ("tg3", {}, r"ens1 has no virtual functions\. Fix", "firmware of NIC and board"),
        (
            "vfio-pci",
            {"total_vfs": 8, "vfs": 0},
            "bound to vfio-pci, and its virtual functions need",
            "driverctl",
        ),
        (
            "igb_uio",
            {"total_vfs": 8, "vfs": 0},
            "bound to igb_uio, and its virtual functions need",
            "driverctl",
        ),
    ],
)
def test_a_nic_without_vfs_is_refused_with_the_reason(
    driver: str, more: dict[str, Any], words: str, fix: str
) -> None:
    with pytest.raises(InvalidRequest, match=words) as refused:
        make_plan(facts_from(machine(nic(driver, **more))), HostIntent(pmd_cores=0, vfs=("ens1=2",)))
    assert fix in str(refused.value.fix) and refused.value.errors[0].field == "vfs"


@pytest.mark.parametrize(("driver", "number"), [("virtio-pci", 2), ("ena", 2), ("vfio-pci", 0)])
def test_a_nic_that_has_vfs_is_not_refused_for_its_model(driver: str, number: int) -> None:
    made = machine(nic(driver, total_vfs=8, vfs=0))
    assert make_plan(facts_from(made), HostIntent(pmd_cores=0, vfs=(f"ens1={number}",))).steps


# -- what the kernel answers -----------------------------------------------------------------------


@pytest.mark.parametrize("code", OF_VF_NUMBER)
@pytest.mark.parametrize("before", [0, 2])
def test_a_refused_number_of_vfs_has_a_cause_and_a_fix(code: int, before: int) -> None:
    host = FakeMachine(vfs=before)
    host.kernel.refusing[NUMVFS] = code
    with pytest.raises(HostError) as refused:
        VfCounts(host.kernel, dict).write(VfCount(NIC), "4")
    cause, fix = OF_VF_NUMBER[code]
    words = os.strerror(code)
    assert refused.value.detail == f"{NUMVFS}: {words[:1].lower()}{words[1:]} ({cause})"
    assert (refused.value.fix, refused.value.step, refused.value.code) == (fix, "write", "host_error")


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.ENOENT, errno.EPERM])
def test_host_apply_reports_the_cause_and_the_fix(journal: Path, code: int) -> None:
    host = FakeMachine()
    host.kernel.refusing[NUMVFS] = code
    result = only_vfs(host, journal, 4)
    cause, fix = OF_VF_NUMBER[code]
    assert result.outcome is StepOutcome.FAILED and cause in str(result.reason) and result.fix == fix


def test_an_error_of_another_number_is_the_kernel_s_text_alone() -> None:
    host = FakeMachine()
    for code, fix in ((errno.EFBIG, None), (errno.EACCES, "run it as root, on the host itself and not in")):
        host.kernel.refusing[NUMVFS] = code
        with pytest.raises(HostError) as refused:
            VfCounts(host.kernel, dict).write(VfCount(NIC), "4")
        assert "(" not in refused.value.detail and str(refused.value.fix).startswith(str(fix))


@pytest.mark.parametrize("code", OF_BINDING)
def test_a_refused_binding_has_a_cause_a_fix_and_the_error_that_it_had(code: int) -> None:
    error = _error("bind-vf", "0000:03:10.1", code, "driver")
    cause, fix = OF_BINDING[code]
    assert error.detail == f"0000:03:10.1 ({cause})" and error.fix == fix and error.code == "host_error"
    assert isinstance(error, VfBusy) is (code in (errno.EBUSY, errno.EAGAIN))
    assert isinstance(error, VfInvalid) is (code == errno.EINVAL)
    assert _error("set-vf", "mac", code, "mac").fix != fix, (
        "the settings of a VF are refused for other reasons"
    )
    assert _error("list-vfs", "interface 3", code, "").fix is None

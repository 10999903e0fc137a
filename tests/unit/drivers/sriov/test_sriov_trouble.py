"""VFs that the host uses, NICs that are away or being reset, and what drivers refuse for a while.

What a driver answers is written after its source in Linux 6.18 (below drivers/net/ethernet), unless
another version is named.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drivers.vf import pool
from drivers.vf.commands import SetVf
from drivers.vf.memory import PLACEHOLDER_MAC
from netplugin.api.errors import (
    BackendUnavailable,
    CapacityExhausted,
    Conflict,
    NetpluginError,
    OperationTimeout,
    Unsupported,
)
from netplugin.api.models import PortState
from netplugin.backend import Claim
from netplugin.host.vf_messages import NO_MAC, VfAttributes
from netplugin.host.vfs import VFIO, VfRefuses
from tests.unit.drivers.sriov.model import ModelPf, takes_all
from tests.unit.drivers.sriov.world import World, make_spec

NIC = "0000:03:00.0"
FIRST = "0000:03:10.0"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """One NIC of two VFs."""
    made = World(tmp_path, ModelPf(NIC, "eth3", total=2))
    yield made
    made.store.close()


def state_of(world: World, address: str) -> tuple[str, str | None]:
    [info] = [info for info in world.reconciler.claims.vfs() if info.pci_address == address]
    return info.state, info.reason


def named(number: int = 1) -> Any:
    return make_spec(number, vf={"pci_address": FIRST})


# -- a VF that the host uses is not given out ------------------------------------------------------


@pytest.mark.parametrize(
    ("use", "words"),
    [
        ({"up": True}, "its interface eth3v0 is up"),
        ({"enslaved": True}, "its interface eth3v0 is enslaved"),
        ({"elsewhere": True}, "in another network namespace"),
    ],
)
def test_a_vf_that_the_host_uses_is_not_given_out(world: World, use: dict[str, bool], words: str) -> None:
    vf = world.model.vf(FIRST)
    for name, value in use.items():
        setattr(vf, name, value)
    was = replace(vf)
    refused = world.plug("a", named())
    assert isinstance(refused, Conflict) and words in refused.detail
    assert world.plug("a", make_spec()) is None
    assert world.address_of("a") == "0000:03:10.1"
    last = world.plug("b", make_spec(2))
    assert isinstance(last, CapacityExhausted) and words in last.detail
    assert vf == was and state_of(world, FIRST)[0] == "unusable"
    assert words in str(state_of(world, FIRST)[1])


def test_a_vf_that_the_host_took_from_a_port_is_not_taken_from_the_host(world: World) -> None:
    assert world.plug("a", named()) is None
    vf = world.model.vf(FIRST)
    vf.driver, vf.override, vf.elsewhere = "igbvf", None, True
    assert world.check()
    record = world.store.get("a")
    assert record is not None and record.state is PortState.FAILED and record.error is not None
    assert "in another network namespace" in record.error.detail and vf.driver == "igbvf"
    vf.elsewhere = False
    assert world.check()
    world.assert_settled()
    vf.driver, vf.override, vf.enslaved = "igbvf", None, True
    refused = world.unplug("a")
    assert isinstance(refused, Conflict) and "eth3v0 is enslaved" in refused.detail
    assert vf.driver == "igbvf" and world.state("a") is PortState.REMOVING
    vf.enslaved = False
    assert world.check()
    assert world.store.records() == []
    world.assert_settled()


@pytest.mark.parametrize("use", ["up", "enslaved", "elsewhere"])
def test_a_vf_that_the_host_begins_to_use_after_it_was_planned(
    world: World, use: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, vf = world.model, world.model.vf(FIRST)
    was, looked = replace(vf), model.look

    def look() -> Any:
        found = looked()
        setattr(vf, use, True)
        return found

    monkeypatch.setattr(model, "look", look)
    refused = world.plug("a", named())
    assert isinstance(refused, Conflict) and "is in use by the host" in refused.detail
    setattr(vf, use, False)
    assert vf == was and model.written == [], "neither its settings nor its driver have changed"
    assert world.store.unfit() == {} and world.store.records() == []


def test_a_vf_that_the_host_begins_to_use_while_it_is_set(world: World) -> None:
    vf = world.model.vf(FIRST)

    def takes_it(pf: ModelPf, number: int, group: str, want: VfAttributes) -> int:
        vf.enslaved = True
        return 0

    world.model.refuses = takes_it
    refused = world.plug("a", named())
    assert isinstance(refused, Conflict) and "eth3v0 is enslaved" in refused.detail
    assert vf.driver == "igbvf" and world.state("a") is PortState.REMOVING
    world.model.refuses, vf.enslaved = takes_all, False
    assert world.check()
    assert world.store.records() == []
    world.assert_settled()


def test_a_vf_that_the_host_begins_to_use_before_it_is_given_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert world.plug("a", named()) is None
    model, vf = world.model, world.model.vf(FIRST)
    vf.driver, vf.override = "igbvf", None
    looked = model.look

    def look() -> Any:
        found = looked()
        vf.enslaved = True
        return found

    monkeypatch.setattr(model, "look", look)
    refused = world.unplug("a")
    assert isinstance(refused, Conflict) and "eth3v0 is enslaved" in refused.detail
    assert vf.driver == "igbvf"
    monkeypatch.undo()
    vf.enslaved = False
    assert world.check()
    world.assert_settled()


# -- a NIC that is away ----------------------------------------------------------------------------


def test_a_delete_waits_for_a_nic_that_is_away(world: World) -> None:
    assert world.plug("a", named()) is None
    pf = world.model.pfs[NIC]
    pf.away = True
    refused = world.unplug("a")
    assert isinstance(refused, OperationTimeout) and refused.status == 504
    assert "there is no NIC 0000:03:00.0" in refused.detail
    assert world.state("a") is PortState.REMOVING
    assert world.check() and world.state("a") is PortState.REMOVING
    pf.away = False
    taken = world.plug("b", named(2))
    assert isinstance(taken, Conflict) and "port a's" in taken.detail, "nobody gets the VF meanwhile"
    assert world.check()
    assert world.store.records() == []
    assert world.plug("b", named(2)) is None and world.unplug("b") is None
    world.assert_settled()


def test_a_delete_waits_for_a_nic_that_is_being_reset(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "PATIENCE_S", 0.2)
    assert world.plug("a", named()) is None
    pf, vf = world.model.pfs[NIC], world.model.vf(FIRST)
    pf.unreported = {0, 1}
    was = replace(vf)
    refused = world.unplug("a")
    assert isinstance(refused, OperationTimeout) and "does not report it" in refused.detail
    assert vf == was, "nothing is done to a VF of which nothing is known"
    pf.unreported = set()
    assert world.check()
    assert world.store.records() == []
    world.assert_settled()


def test_what_is_released_while_its_nic_is_away_is_forgotten(world: World) -> None:
    assert world.plug("a", named()) is None
    claim = Claim("vf", FIRST)
    with pytest.raises(Conflict, match="port a goes when it is free"):
        world.reconciler.claims.abandon("a", claim_of(world, "a"))
    world.model.pfs[NIC].away = True
    assert isinstance(world.unplug("a"), OperationTimeout)
    world.reconciler.claims.abandon("a", claim_of(world, "a"))
    assert world.store.records() == [] and claim not in world.store.claims()
    world.model.pfs[NIC].away = False
    # Its settings are still those of the VM: they are not taken for those of the host.
    assert world.plug("b", named(2)) is None and world.unplug("b") is None
    reported = world.model.vf(FIRST).attributes
    assert (reported.mac, reported.vlan, reported.trusted) == (NO_MAC, 0, False)


@pytest.mark.parametrize("hidden", [{"unreported": {0, 1}}, {"link": {"up": False}}])
def test_a_nic_that_is_there_is_waited_for_whatever_is_released(
    world: World, hidden: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release forgets the port with the settings of its VM on the VF."""
    monkeypatch.setattr(pool, "PATIENCE_S", 0.2)
    assert world.plug("a", named()) is None
    pf = world.model.pfs[NIC]
    pf.unreported = {0, 1}
    assert isinstance(world.unplug("a"), OperationTimeout)
    for name, value in hidden.items():
        setattr(pf, name, value)
    with pytest.raises(Conflict, match="port a goes when it is free"):
        world.reconciler.claims.abandon("a", claim_of(world, "a"))
    assert world.state("a") is PortState.REMOVING
    pf.unreported, pf.link = set(), {}
    assert world.check()
    assert world.store.records() == []
    world.assert_settled()


def claim_of(world: World, port_id: str) -> Claim:
    record = world.store.get(port_id)
    assert record is not None
    return record.claims[0]


# -- a VF that the NIC does not report -------------------------------------------------------------


def test_a_vf_that_is_not_reported_has_no_defaults(world: World) -> None:
    pf = world.model.pfs[NIC]
    pf.unreported = {0, 1}
    for spec in (make_spec(), named()):
        refused = world.plug("a", spec)
        assert isinstance(refused, BackendUnavailable | Conflict), refused
        assert "eth3 does not report it" in refused.detail
    pf.unreported = {0}
    assert world.plug("a", make_spec()) is None and world.address_of("a") == "0000:03:10.1"
    pf.unreported = {1}
    world.model.written.clear()
    assert world.check()
    record = world.store.get("a")
    assert record is not None and record.state is PortState.DEGRADED and record.error is not None
    assert "does not report it" in record.error.detail and world.model.written == []
    pf.unreported = set()
    assert world.check()
    world.assert_settled()


def test_a_vf_that_is_reset_by_a_change_is_waited_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function-level reset of a VF is seen to by its PF's driver later (ice_process_vflr_event,
    i40e_vc_process_vflr_event): until then it is not reported."""
    pf, model = world.model.pfs[NIC], world.model
    looks = {"look": model.look, "look_again": model.look_again}
    hides = 0

    def look(name: str, *args: Any) -> Any:
        nonlocal hides
        hides = 3 if name == "look_again" and not pf.unreported else hides - 1
        pf.unreported = {0} if hides > 0 else set()
        return looks[name](*args)

    for name in looks:
        monkeypatch.setattr(model, name, partial(look, name))
    put = world.put("a", named())
    [again] = world.reconciler.plug.serve([put])
    assert again is put and not put.future.done() and world.state("a") is PortState.PENDING
    assert world.check(), "a look meanwhile leaves it to the call"
    assert not put.future.done() and world.state("a") is PortState.PENDING
    while again:
        again = world.reconciler.plug.resume([put])
    assert put.future.exception() is None and world.state("a") is PortState.ACTIVE
    assert world.unplug("a") is None
    monkeypatch.undo()
    pf.unreported = set()
    world.assert_settled()


# -- what drivers refuse ---------------------------------------------------------------------------


class Refuses:
    """A driver that answers ``code`` to the first ``times`` of these groups, or to all of them.

    ``hides``: it does not report the VF either, for so many looks.
    """

    def __init__(self, code: int, *groups: str, times: int = 1 << 30, hides: bool = False) -> None:
        self.code, self.groups, self.times, self.hides = code, groups, times, hides
        self.hidden: tuple[ModelPf, int] | None = None

    def __call__(self, pf: ModelPf, number: int, group: str, want: VfAttributes) -> int:
        refuses = self.times > 0 and (not self.groups or group in self.groups)
        self.times -= refuses
        if refuses and self.hides:
            pf.unreported, self.hidden = {number}, (pf, self.times)
        return self.code if refuses else 0

    def seen(self) -> None:
        """A look."""
        if self.hidden is not None:
            pf, looks = self.hidden
            self.hidden = (pf, looks - 1)
            if looks <= 0:
                pf.unreported, self.hidden = set(), None


def trouble(world: World, refuses: Refuses) -> None:
    """The NICs answer so from now on."""
    world.model.refuses, world.model.seen = refuses, refuses.seen


#: By driver: what it answers while a VF or the NIC is being reset, and whether the VF is then left
#: out of what it reports.
TRANSIENT = {
    # intel/ice/ice_vf_lib.c, ice_check_vf_ready_for_cfg: the VF is not initialized.
    "ice, not initialized": (errno.EBUSY, True),
    # The same: the VF is disabled, as while the NIC is being reset.
    "ice, disabled": (errno.EINVAL, True),
    # intel/i40e/i40e_virtchnl_pf.c, i40e_check_vf_init_timeout, and __I40E_VIRTCHNL_OP_PENDING.
    "i40e, in reset": (errno.EAGAIN, False),
    # The same file, i40e_validate_vf: the VF has no VSI.
    "i40e, without a VSI": (errno.EINVAL, True),
    # broadcom/bnxt/bnxt_hwrm.c, __hwrm_to_stderr: the firmware has no resources, or is busy.
    "bnxt, firmware is busy": (errno.EAGAIN, False),
    # mellanox/mlx5/core/cmd.c, mlx5_cmd_check: while the device is in an error state.
    "mlx5, in recovery": (errno.EIO, True),
}


@pytest.mark.parametrize("case", TRANSIENT)
def test_a_refusal_that_passes_is_tried_again(world: World, case: str) -> None:
    code, hides = TRANSIENT[case]
    trouble(world, Refuses(code, times=2, hides=hides))
    assert world.plug("a", named()) is None
    assert world.store.unfit() == {}
    trouble(world, Refuses(code, times=2, hides=hides))
    assert world.unplug("a") is None
    assert world.store.unfit() == {}
    world.assert_settled()


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EIO, errno.EBUSY])
def test_a_driver_that_cannot_be_bound_while_the_nic_is_being_reset(world: World, code: int) -> None:
    trouble(world, Refuses(code, "driver", times=2, hides=True))
    assert world.plug("a", named()) is None
    assert world.store.unfit() == {}
    trouble(world, Refuses(code, "driver", times=2, hides=True))
    assert world.unplug("a") is None
    assert world.store.unfit() == {}
    world.assert_settled()


def test_a_driver_that_cannot_be_bound_to_a_vf_of_a_nic_in_order(world: World) -> None:
    world.model.refuses = lambda pf, number, group, want: (
        errno.EINVAL if group == "driver" and number == 0 else 0
    )
    refused = world.plug("a", named())
    assert isinstance(refused, VfRefuses)
    assert set(world.store.unfit()) == {Claim("vf", FIRST)}
    assert world.plug("b", make_spec(2)) is None and world.address_of("b") == "0000:03:10.1"


@pytest.mark.parametrize("case", TRANSIENT)
def test_a_refusal_that_lasts_is_a_timeout(world: World, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And quarantine, unless the NIC leaves the VF out: then it is the NIC that is not in order."""
    monkeypatch.setattr(pool, "PATIENCE_S", 0.2)
    code, hides = TRANSIENT[case]
    world.model.refuses = Refuses(code, hides=hides)
    refused = world.plug("a", named())
    assert isinstance(refused, OperationTimeout) and "did not end in time" in refused.detail
    assert refused.retryable
    assert set(world.store.unfit()) == (set() if hides else {Claim("vf", FIRST)})
    world.model.refuses = Refuses(0, times=0)
    world.model.pfs[NIC].unreported = set()
    assert world.check()
    world.assert_settled()


def test_a_vf_that_is_busy_holds_up_no_other(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "PATIENCE_S", 0.2)
    world.model.refuses = lambda pf, number, group, want: errno.EBUSY if number == 0 else 0
    puts = [world.put("a", named()), world.put("b", make_spec(2))]
    assert world.serve(*puts)
    assert isinstance(puts[0].future.exception(), OperationTimeout)
    assert puts[1].future.exception() is None and world.state("b") is PortState.ACTIVE


def test_a_nic_that_is_busy_holds_up_no_other(tmp_path: Path) -> None:
    """Neither calls nor looks: it is tried again after they had their turn."""
    other = ModelPf("0000:04:00.0", "eth4", total=1, network="net2")
    world = World(tmp_path, ModelPf(NIC, "eth3", total=2), other)
    assert world.plug("c", make_spec(3)) is None
    vf = world.vf_of("c")
    world.model.refuses = lambda pf, number, group, want: errno.EAGAIN if pf.address == NIC else 0
    first = world.put("a", make_spec())
    assert world.reconciler.plug.serve([first]) == [first] and not first.future.done()
    assert world.plug("b", make_spec(2, network={"physical_network": "net2"})) is None
    vf.attributes = replace(vf.attributes, vlan=7)
    assert world.check()
    assert {i: world.state(i) for i in "abc"} == {
        "a": PortState.PENDING,
        "b": PortState.ACTIVE,
        "c": PortState.ACTIVE,
    }
    assert world.reconciler.unsettled() and world.store.unfit() == {}
    assert world.reconciler.plug.resume([first]) == [first]
    world.model.refuses = takes_all
    assert world.reconciler.plug.resume([first]) == [] and first.future.exception() is None
    assert world.check() and not world.reconciler.unsettled()
    world.assert_settled()
    world.store.close()


def test_a_call_on_a_busy_nic_is_undone_when_the_agent_stops(world: World) -> None:
    world.model.refuses = Refuses(errno.EAGAIN, "vlan")
    put = world.put("a", named())
    assert world.reconciler.plug.serve([put]) == [put]
    assert world.reconciler.plug.resume([put], last=True) == []
    assert isinstance(put.future.exception(), OperationTimeout)
    world.model.refuses = takes_all
    assert world.check()
    assert world.store.records() == []
    world.assert_settled()


def test_a_look_does_not_extend_the_deadline_of_a_call(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()  # that of the deadlines: it may be small, as on a machine that has just booted
    monkeypatch.setattr(pool, "time", SimpleNamespace(monotonic=lambda: now))
    world.model.refuses = Refuses(errno.EAGAIN, "vlan")
    put = world.put("a", named())
    assert world.reconciler.plug.serve([put]) == [put]
    now += pool.PATIENCE_S
    assert world.check() and not put.future.done()
    assert world.reconciler.plug.resume([put]) == []
    assert isinstance(put.future.exception(), OperationTimeout)
    world.model.refuses = takes_all
    assert world.check()
    world.assert_settled()


def test_a_vf_that_stays_busy_is_not_chosen_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "PATIENCE_S", 0.2)
    world.model.refuses = lambda pf, number, group, want: errno.EBUSY if number == 0 else 0
    assert isinstance(world.plug("a", make_spec()), OperationTimeout)
    assert world.plug("b", make_spec(2)) is None and world.address_of("b") == "0000:03:10.1"
    world.model.pfs[NIC].link = {"up": False}
    assert world.check()
    world.model.pfs[NIC].link = {}
    world.model.refuses = Refuses(0, times=0)
    assert world.check() and not world.store.unfit()
    assert world.plug("a", make_spec()) is None and world.address_of("a") == FIRST


def test_a_vf_that_is_busy_when_the_time_is_short_is_not_judged(world: World) -> None:
    world.model.refuses = Refuses(errno.EBUSY)
    change = SetVf(("a",), FIRST, 0, 0, "eth3", ("mac",), VfAttributes("52:54:00:00:00:01"))
    applied = world.driver.apply([change], time.monotonic() + 0.2)
    assert isinstance(applied.failed["a"], OperationTimeout) and applied.unfit == {}


#: What a NIC cannot do at all, by driver: the errno, and the port that asks for it.
LIMITS: dict[str, tuple[int, str, dict[str, Any]]] = {
    # broadcom/bnxt/bnxt_sriov.c of Linux 5.15, bnxt_set_vf_vlan: any priority.
    "bnxt, a priority": (errno.EINVAL, "vlan", {"vf": {"vlan_qos": 3}}),
    # The same function, and bnxt_set_vf_spoofchk: an old firmware. ENOTSUPP is the kernel's own.
    "bnxt, an old firmware": (524, "vlan", {}),
    "bnxt, a rate above the link's": (errno.EINVAL, "rate", {"qos": {"egress_kbps": 90_000_000}}),
    # intel/i40e/i40e_virtchnl_pf.c, i40e_ndo_set_vf_bw and i40e_ndo_set_vf_trust (MFP).
    "i40e, a least rate": (errno.EINVAL, "rate", {"qos": {"min_egress_kbps": 50_000}}),
    "i40e, trust": (errno.EINVAL, "trust", {"vf": {"trusted": True}, "port_security": {"enabled": False}}),
    # intel/ice/ice_sriov.c, ice_set_vf_bw with DCB.
    "ice, a least rate": (errno.EOPNOTSUPP, "rate", {"qos": {"min_egress_kbps": 50_000}}),
    # mellanox/mlx5/core/esw/legacy.c, mlx5_eswitch_set_vport_spoofchk in switchdev mode.
    "mlx5, spoofchk": (errno.EOPNOTSUPP, "spoofchk", {"port_security": {"enabled": False}}),
}


@pytest.mark.parametrize("case", LIMITS)
def test_a_limit_of_the_nic_is_unsupported_and_no_quarantine(world: World, case: str) -> None:
    code, group, fields = LIMITS[case]
    world.model.refuses = Refuses(code, group)
    refused = world.plug("a", make_spec(**fields))
    assert isinstance(refused, Unsupported), refused
    assert world.store.unfit() == {} and world.store.records() == []
    world.model.refuses = Refuses(0, times=0)
    world.assert_settled()


@pytest.mark.parametrize("driver", ["qede", "cxgb4", "bnx2x"])
def test_a_nic_that_refuses_a_mac_of_zeros_gets_a_placeholder(tmp_path: Path, driver: str) -> None:
    """qlogic/qede/qede_main.c, qede_set_vf_mac; chelsio/cxgb4/cxgb4_main.c, cxgb4_mgmt_set_vf_mac.

    broadcom/bnx2x/bnx2x_sriov.c, bnx2x_set_vf_mac, too: it stands for drivers that nobody listed.
    """
    world = World(tmp_path, ModelPf(NIC, "eth3", total=1, driver=driver, vf_driver=None))
    world.model.refuses = lambda pf, number, group, want: (
        errno.EINVAL if group == "mac" and want.mac == NO_MAC else 0
    )
    assert world.plug("a", make_spec()) is None
    assert world.unplug("a") is None
    assert world.model.vf(FIRST).attributes.mac == PLACEHOLDER_MAC
    assert world.store.unfit() == {}
    world.store.close()


def test_a_teamed_vf_of_a_nic_that_refuses_a_mac_of_zeros_gets_a_placeholder(
    tmp_path: Path,
) -> None:
    """broadcom/bnx2x/bnx2x_sriov.c, bnx2x_set_vf_mac, as above."""
    world = World(tmp_path, ModelPf(NIC, "eth3", total=1, driver="bnx2x"))
    world.model.refuses = lambda pf, number, group, want: (
        errno.EINVAL if group == "mac" and want.mac == NO_MAC else 0
    )
    for vlan in (100, 200):
        assert world.plug("a", make_spec(vlan_id=vlan, vf={"teaming": True})) is None
        attributes = world.model.vf(FIRST).attributes
        assert (attributes.mac, attributes.vlan) == (PLACEHOLDER_MAC, vlan)
    world.model.written.clear()
    assert world.check() and world.model.written == []
    assert world.unplug("a") is None
    assert world.store.unfit() == {} and world.store.records() == []
    world.store.close()


#: What a driver answers when it has no spoof check: it reports that it is off all the same.
NO_SPOOFCHK = {
    # broadcom/bnxt/bnxt_sriov.c, bnxt_set_vf_spoofchk, with an old firmware.
    "bnxt_en": 524,
    # netronome/nfp/nfp_net_sriov.c, nfp_net_sriov_check, without NFP_NET_VF_CFG_MB_CAP_SPOOF.
    "nfp": errno.EOPNOTSUPP,
}


@pytest.mark.parametrize("driver", NO_SPOOFCHK)
@pytest.mark.parametrize("asked", [False, True])
def test_a_vf_found_on_vfio_goes_back_without_a_spoof_check(tmp_path: Path, driver: str, asked: bool) -> None:
    world = World(tmp_path, ModelPf(NIC, "eth3", total=1, driver=driver))
    vf = world.model.vf(FIRST)
    vf.driver = vf.override = VFIO
    vf.attributes = VfAttributes("52:54:00:99:00:01", 77, 0, False, False)
    world.model.refuses = Refuses(NO_SPOOFCHK[driver], "spoofchk")
    refused = world.plug("a", make_spec(port_security={"enabled": asked}))
    assert isinstance(refused, Unsupported) if asked else refused is None
    assert world.unplug("a") is None
    assert world.store.records() == [] and world.store.unfit() == {}
    assert vf.attributes == VfAttributes(spoofchk=False, trusted=False)
    world.store.close()


@pytest.mark.parametrize(("driver", "begins"), [("mlx5_core", False), ("ice", True), ("unknown", False)])
def test_a_vf_found_on_vfio_gets_the_spoof_check_that_its_driver_begins_with(
    tmp_path: Path, driver: str, begins: bool
) -> None:
    """mlx5_esw_vport_alloc: off; ice_initialize_vf_entry: on. Of others: as it was found."""
    world = World(tmp_path, ModelPf(NIC, "eth3", total=1, driver=driver))
    vf = world.model.vf(FIRST)
    vf.driver = vf.override = VFIO
    vf.attributes = VfAttributes("52:54:00:99:00:01", 77, 0, driver == "mlx5_core", False)
    assert world.plug("a", make_spec()) is None and world.unplug("a") is None
    assert vf.attributes == VfAttributes(spoofchk=begins, trusted=False)
    world.store.close()


def test_what_a_nic_does_not_support_any_more_is_not_put_back(world: World) -> None:
    """As when the firmware is another one, or the NIC was put into switchdev mode and back."""
    vf = world.model.vf(FIRST)
    vf.attributes = replace(vf.attributes, spoofchk=False, max_mbps=100)
    assert world.plug("a", named()) is None
    world.model.refuses = Refuses(errno.EOPNOTSUPP, "spoofchk")
    assert world.unplug("a") is None
    assert world.store.records() == [] and world.store.unfit() == {}
    assert (vf.driver, vf.override) == ("igbvf", None)
    assert (vf.attributes.spoofchk, vf.attributes.max_mbps) == (True, 100), "only that one stays"
    vf.attributes = replace(vf.attributes, spoofchk=False)
    assert isinstance(world.plug("a", named()), Unsupported), "what a port needs is not unusable"
    world.model.refuses = takes_all
    assert world.plug("a", named()) is None and world.unplug("a") is None
    assert vf.attributes.spoofchk is False, "the NIC is asked again for each port"


def test_a_priority_that_a_driver_drops_is_unsupported(tmp_path: Path) -> None:
    """qlogic/qede/qede_main.c, qede_set_vf_vlan: it would not be there when it is read back."""
    world = World(tmp_path, ModelPf(NIC, "eth3", total=1, driver="qede"))
    assert isinstance(world.plug("a", make_spec(vf={"vlan_qos": 3})), Unsupported)
    assert world.plug("a", make_spec()) is None
    world.store.close()


def test_a_rate_that_waits_for_a_carrier(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """intel/igb/igb_main.c, igb_ndo_set_vf_bw: invalid while the link is down, to end a rate too."""
    monkeypatch.setattr(pool, "PATIENCE_S", 0.2)
    limited = make_spec(qos={"egress_kbps": 200_000}, vf={"pci_address": FIRST})
    pf, vf = world.model.pfs[NIC], world.model.vf(FIRST)
    world.model.refuses = lambda pf, number, group, want: (
        errno.EINVAL if group == "rate" and not pf.link.get("carrier", True) else 0
    )
    assert world.plug("a", limited) is None
    pf.link = {"carrier": False}
    assert world.unplug("a") is None, "a carrier may never come back"
    assert world.store.records() == [] and world.store.unfit() == {}
    assert vf.attributes.max_mbps == 200 and vf.driver == "igbvf"
    assert world.plug("b", named(2)) is None and world.state("b") is PortState.DEGRADED
    pf.link = {}
    assert world.check()
    assert vf.attributes.max_mbps == 0, "the next port has none"
    assert world.unplug("b") is None
    world.assert_settled()


@pytest.mark.parametrize("driver", ["igb", "ixgbe", "i40e"])
def test_a_rate_is_set_when_the_nic_has_a_carrier(tmp_path: Path, driver: str) -> None:
    """igb_ndo_set_vf_bw, ixgbe_ndo_set_vf_bw and i40e_set_bw_limit compare a rate with the link's
    speed, and call any invalid without a link."""
    world = World(tmp_path, ModelPf(NIC, "eth3", total=2, driver=driver))
    pf = world.model.pfs[NIC]
    pf.link = {"carrier": False}
    world.model.refuses = lambda pf, number, group, want: (
        errno.EINVAL if group == "rate" and not pf.link.get("carrier", True) else 0
    )
    assert world.plug("a", make_spec(qos={"egress_kbps": 200_000})) is None
    record = world.store.get("a")
    assert record is not None and record.state is PortState.DEGRADED and record.error is not None
    assert "the port's rates are set when it has one" in record.error.detail
    assert world.vf_of("a").driver == VFIO and world.vf_of("a").attributes.max_mbps == 0
    pf.link = {}
    assert world.check()
    assert world.vf_of("a").attributes.max_mbps == 200
    world.assert_settled()
    pf.link = {"carrier": False}
    assert world.plug("b", make_spec(2, qos={"egress_kbps": 200_000})) is None
    assert world.unplug("b") is None, "nothing of it has to be put back"
    world.store.close()


def test_a_nic_in_order_that_refuses_is_quarantined(world: World) -> None:
    world.model.refuses = Refuses(errno.EIO, "mac")
    refused = world.plug("a", named())
    assert isinstance(refused, NetpluginError) and not refused.retryable
    assert world.store.unfit() == {Claim("vf", FIRST): "mac: Input/output error"}


def test_a_quarantine_ends_when_the_nic_has_recovered(world: World) -> None:
    world.model.refuses = Refuses(errno.EIO, "mac")
    assert isinstance(world.plug("a", named()), NetpluginError)
    world.model.refuses = Refuses(0, times=0)
    assert world.check() and world.store.unfit(), "nothing has changed"
    world.model.pfs[NIC].unreported = {0, 1}
    assert world.check() and world.store.unfit()
    world.model.pfs[NIC].unreported = set()
    assert world.check() and not world.store.unfit()
    assert world.plug("a", named()) is None
    world.assert_settled()


def test_a_quarantine_does_not_end_when_a_vm_closes_the_vf(world: World) -> None:
    world.model.refuses = Refuses(errno.EIO, "mac")
    assert isinstance(world.plug("a", named()), NetpluginError)
    world.model.refuses = takes_all
    vf = world.model.vf(FIRST)
    vf.driver, vf.is_open = VFIO, True
    assert world.check() and world.store.unfit()
    vf.is_open = False
    assert world.check() and world.store.unfit(), "its NIC was in order all the time"


def test_a_quarantine_ends_after_a_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.model.refuses = Refuses(errno.EIO, "mac")
    assert isinstance(world.plug("a", named()), NetpluginError)
    monkeypatch.setattr("agents.ports.claims.FIRST_S", 0.0)
    assert world.check() and not world.store.unfit()
    assert isinstance(world.plug("a", named()), NetpluginError)
    assert world.store.unfit(), "and it begins again, if nothing is better"


# -- a NIC without a carrier -----------------------------------------------------------------------


def test_a_nic_without_a_carrier_makes_its_ports_degraded(world: World) -> None:
    assert world.plug("a", named()) is None
    pf = world.model.pfs[NIC]
    pf.link = {"carrier": False}
    assert world.check()
    record = world.store.get("a")
    assert record is not None and record.state is PortState.DEGRADED and record.error is not None
    assert "eth3 has no carrier" in record.error.detail
    assert world.plug("b", make_spec(2)) is None, "a plug succeeds all the same"
    assert world.state("b") is PortState.DEGRADED
    pf.link = {}
    assert world.check()
    world.assert_settled()


# -- what is put back ------------------------------------------------------------------------------


def test_the_mac_that_a_vfs_driver_chose_is_not_written_through_the_pf(world: World) -> None:
    vf = world.model.vf(FIRST)
    assert vf.attributes.mac != NO_MAC and not vf.admin_mac
    assert world.plug("a", named()) is None
    assert vf.admin_mac
    assert world.unplug("a") is None
    assert not vf.admin_mac, "its driver may choose again"
    world.assert_settled()


def test_the_mac_that_an_operator_set_is_put_back(world: World) -> None:
    vf = world.model.vf(FIRST)
    vf.attributes, vf.admin_mac = replace(vf.attributes, mac="52:54:00:aa:00:01"), True
    world.before[FIRST] |= {"attributes": {**world.before[FIRST]["attributes"], "mac": vf.attributes.mac}}
    world.before[FIRST] |= {"admin_mac": True}
    assert world.plug("a", named()) is None and world.unplug("a") is None
    world.assert_settled()


def test_the_mac_that_an_operator_set_is_put_back_where_the_driver_has_not_taken_it(
    world: World,
) -> None:
    """igb_ndo_set_vf_mac: "Reload the VF driver to make this change effective"."""
    vf, mac = world.model.vf(FIRST), "52:54:00:aa:00:01"
    vf.chosen_mac = vf.attributes.mac
    vf.attributes, vf.admin_mac = replace(vf.attributes, mac=mac), True
    assert world.plug("a", named()) is None and world.unplug("a") is None
    assert (vf.attributes.mac, vf.admin_mac) == (mac, True)


def test_a_stacked_vlan_is_put_back(world: World) -> None:
    """ice_set_vf_port_vlan and bnxt_set_vf_vlan take 802.1ad where the NIC can."""
    vf = world.model.vf(FIRST)
    vf.attributes = replace(vf.attributes, vlan=7, vlan_stacked=True)
    assert world.plug("a", named()) is None
    assert (vf.attributes.vlan, vf.attributes.vlan_stacked) == (100, False)
    assert world.unplug("a") is None
    assert (vf.attributes.vlan, vf.attributes.vlan_stacked) == (7, True)


def test_a_nic_that_refuses_802_1ad_is_unsupported_and_left_as_it_was(tmp_path: Path) -> None:
    """ice_set_vf_port_vlan in single VLAN mode: ice_is_supported_port_vlan_proto."""
    world = World(tmp_path, ModelPf(NIC, "eth3", total=1, driver="ice"))
    world.model.refuses = lambda pf, number, group, want: (
        errno.EPROTONOSUPPORT if want.vlan_stacked and group == "vlan" else 0
    )
    refused = world.plug("a", make_spec(vf={"vlan_proto": "802.1ad"}))
    assert isinstance(refused, Unsupported) and "vf.vlan_proto 802.1Q" in str(refused.fix)
    assert world.store.unfit() == {} and world.store.records() == []
    world.assert_settled()
    world.store.close()


def test_the_settings_of_a_vm_that_was_not_ours_are_not_put_back(world: World) -> None:
    """A VF on vfio that nobody has open and that has a MAC: some VM had it before."""
    vf = world.model.vf(FIRST)
    vf.driver = vf.override = VFIO
    vf.attributes = VfAttributes("52:54:00:99:00:01", 77, 0, False, True)
    assert world.plug("a", named()) is None and world.unplug("a") is None
    assert (vf.driver, vf.override) == (VFIO, VFIO)
    assert vf.attributes == VfAttributes(spoofchk=True, trusted=False)


def test_a_vf_is_given_back_after_libvirt_has_written(world: World) -> None:
    """virHostdevRestoreNetConfig comes after QEMU has closed the VF, and would undo what we did."""
    assert world.plug("a", named()) is None
    world.model.start_vm(FIRST)
    assert isinstance(world.unplug("a"), Conflict)
    world.model.stop_vm(FIRST, libvirt_is_slow=True)
    assert world.check() and world.state("a") is PortState.REMOVING
    refused = world.unplug("a")
    assert isinstance(refused, Conflict) and "/run/libvirt/hostdevmgr/eth3_vf0" in refused.detail
    world.model.libvirt_writes_back(FIRST)
    assert world.check()
    assert world.store.records() == []
    world.assert_settled()


def test_a_nic_of_no_node_serves_every_node(tmp_path: Path) -> None:
    world = World(tmp_path, ModelPf(NIC, "eth3", total=2, numa_node=None))
    assert world.plug("a", make_spec(numa_node=1)) is None
    assert world.plug("b", make_spec(2, numa_node=0, vf={"pci_address": "0000:03:10.1"})) is None
    world.store.close()


def test_vfs_that_were_made_again_and_given_to_a_container_are_left_to_it(world: World) -> None:
    """They have the addresses and numbers of those before."""
    assert world.plug("a", named()) is None
    [pf] = [pf for pf in world.model.pfs.values() if pf.vf_address(0) == FIRST]
    pf.make_vfs(len(pf.vfs))
    vf = world.model.vf(FIRST)
    vf.attributes = VfAttributes(mac="02:00:00:00:99:99", vlan=200, spoofchk=False, trusted=True)
    vf.elsewhere = True
    theirs = replace(vf)
    assert world.check() and vf == theirs and world.state("a") is PortState.FAILED
    assert world.unplug("a") is None
    assert vf == theirs and world.store.get("a") is None


@pytest.mark.parametrize("number", range(2))
def test_a_container_that_gets_the_vf_between_two_writes_keeps_it(world: World, number: int) -> None:
    """Each write of a release asks who has the VF."""
    assert world.plug("a", named()) is None
    vf, writes = world.model.vf(FIRST), 0
    states = []

    def given(pf: ModelPf, vf_number: int, group: str, want: VfAttributes) -> int:
        nonlocal writes
        if writes == number:
            vf.driver, vf.elsewhere = "igbvf", True
        if vf.elsewhere:
            states.append((group, replace(vf)))
        writes += 1
        return 0

    world.model.refuses = given
    world.unplug("a")
    assert len(states) == 1, "nothing is written after that"

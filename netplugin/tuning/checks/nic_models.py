"""Check whether DPDK can use the NICs as they are bound (pure), from the facts of one NIC at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from netplugin.api.models import Finding
from netplugin.host.nic_models import Binding, dpdk_fault, model_of
from netplugin.host.vfs import in_user_space
from netplugin.tuning.checks.scene import Scene
from netplugin.tuning.facts import HostNic
from netplugin.tuning.root import known


def nic_models(scene: Scene) -> Iterator[Finding]:
    plan = scene.plan
    for nic in known(scene.facts.network.nics, ()):
        planned = plan is not None and nic in plan.nics
        yield from of_nic(nic, planned, names_them=plan is not None and bool(plan.intent.nics))


def of_nic(nic: HostNic, planned: bool, *, names_them: bool) -> Iterator[Finding]:
    """``planned``: PMD threads of the plan serve it. ``names_them``: the operator names the NICs for DPDK."""
    model, bound = model_of(nic.driver, nic.device), in_user_space(nic.driver)
    where = f"{nic.address} ({nic.device}) has {nic.driver or 'no driver'}"
    fault = dpdk_fault(nic.address, nic.driver, nic.device)
    if fault is not None and (planned or bound):
        # A VM may have a whole NIC: one that is not for DPDK, if it is known which are.
        yield _finding("warn" if names_them and not planned else "fail", *fault)
    elif planned and not bound and model.binding is Binding.UNKNOWN:
        found = f"{where}, and whether DPDK has a driver for such a NIC is not known here"
        yield _finding("warn", found, "see https://doc.dpdk.org/guides/nics, or name another NIC")
    elif planned and model.needs:
        yield _finding("ok", f"{where}; DPDK needs {model.needs}")


def _finding(status: Literal["ok", "warn", "fail"], found: str, fix: str | None = None) -> Finding:
    return Finding(
        id="nic-model",
        status=status,
        found=found,
        expected="NICs of the plan that DPDK has a driver for, on the kernel driver that it needs",
        fix=fix,
    )

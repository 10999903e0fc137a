"""Check that the guest's CPU model suits DPDK and that all vCPUs are present at boot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from netplugin.libvirt_xml import Element
from netplugin.models import Finding
from netplugin.placing.checks.case import Case, graded
from netplugin.placing.write import is_kvm

#: QEMU CPU models without SSE4.2, which DPDK requires; ``qemu64`` is QEMU's default on x86.
_POOR: Final = frozenset(
    ("qemu64", "qemu32", "kvm64", "kvm32", "pentium", "pentium2", "pentium3", "486", "core2duo",
     "coreduo", "n270", "athlon", "phenom", "Conroe", "Penryn", "Opteron_G1", "Opteron_G2",
     "Opteron_G3")
)  # fmt: skip


def model(case: Case) -> Iterator[Finding]:
    cpu = case.domain.find("cpu")
    name = _name(cpu)
    poor = name is None or name in _POOR
    wanted = "host-passthrough" if is_kvm(case.domain) else "maximum"
    yield graded(
        "cpu-mode", f"the CPU is {name or 'the least that QEMU has'}" if poor else None,
        f"the CPU is {name}", f"a CPU with all that DPDK uses, as <cpu mode='{wanted}'>",
        f"write <cpu mode='{wanted}'>, or render the domain with policy.pin",
    )  # fmt: skip
    vcpu = case.domain.find("vcpu")
    now = str(case.vcpus) if vcpu is None else vcpu.get("current", str(case.vcpus))
    late = f"{now} of {case.vcpus} vCPUs from the start" if now != str(case.vcpus) else None
    if case.ground is not None:
        yield graded(
            "vcpu-hotplug", late, f"all {case.vcpus} vCPUs from the start",
            "all vCPUs from the start: one that comes later is not placed", "remove current from <vcpu>",
        )  # fmt: skip


def _name(cpu: Element | None) -> str | None:
    if cpu is None:
        return None
    named = cpu.findtext("model")
    return cpu.get("mode") if cpu.get("mode") not in (None, "custom") else named

"""Input of the host checks, and the comparison of a host with its plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from netplugin.api.models import Finding
from netplugin.host.cpus import from_mask
from netplugin.tuning.facts import Cpus, Facts, Live
from netplugin.tuning.planning.plan import TuningPlan
from netplugin.tuning.root import Fact, Unknown, known
from netplugin.tuning.steps import Effect, Group, Step

T = TypeVar("T")


@dataclass(frozen=True)
class Scene:
    """A host's facts and live state, and its plan if an intent is configured."""

    facts: Facts
    live: Live = field(default_factory=Live)
    plan: TuningPlan | None = None

    def cpus_of(self, group: str) -> Cpus:
        """The plan's CPUs that processes in this cgroup need."""
        if self.plan is None:
            return frozenset()
        partition = self.plan.partition
        return _of(group, partition.pmd, partition.vm | partition.emulator) or frozenset()

    def hugepages_mb(self, group: str, size_kb: int) -> int:
        """The plan's memory, MB, in hugepages of this size that processes in this cgroup need."""
        pages = [p for p in self.plan.pages if p.size_kb == size_kb] if self.plan else []
        return _of(group, sum(p.ovs_mb for p in pages), sum(p.vm_mb for p in pages)) or 0

    @property
    def polling(self) -> Cpus:
        """CPUs of PMD threads: running, in pmd-cpu-mask, and planned."""
        ovs = known(self.live.ovs, None)
        planned = self.plan.partition.polling if self.plan else frozenset()
        if ovs is None or not ovs.dpdk_initialized:
            return planned
        try:
            mask = frozenset(from_mask(ovs.other_config.get("pmd-cpu-mask", "")))
        except ValueError:
            mask = frozenset()  # the ovs check reports this
        return planned | mask | self.running_pmds

    @property
    def running_pmds(self) -> Cpus:
        """CPUs of the running PMD threads."""
        ovs = known(self.live.ovs, None)
        return frozenset(pmd.cpu for pmd in ovs.pmds) if ovs else frozenset()

    @property
    def realtime(self) -> bool:
        return self.plan is not None and self.plan.intent.realtime


def _of(group: str, ovs: T, vms: T) -> T | None:
    """Choose by slice: systemd runs vswitchd in system.slice, libvirt runs VMs in machine.slice."""
    if group.startswith("/system.slice"):
        return ovs
    return vms if group.startswith("/machine.slice") else None


# -- Compare the host with its plan: one finding per group of steps. ------------------------------


_FIX = {
    Effect.LIVE: "netplugin host apply shows the steps, and takes them with --yes",
    Effect.OVS_RESTART: "set them and restart OVS when its VMs can spare it",
    Effect.REBOOT: "set them and boot again",
}
#: Maximum number of steps named in one finding; the plan lists all.
_SHOWN = 4


def planned(scene: Scene) -> Iterator[Finding]:
    """One finding per group of steps, except hugepages, which have their own check."""
    if scene.plan is None:
        return
    for group in Group:
        steps = [step for step in scene.plan.steps if step.group is group]
        if not steps or group is Group.HUGEPAGES:
            continue
        left = [step for step in steps if not step.done]
        slowest = max((step.effect for step in left), key=list(Effect).index, default=Effect.LIVE)
        yield Finding(
            id=f"plan-{group}",
            status="warn" if left else "ok",
            found=_some(left, desired=False) if left else f"all {len(steps)} as planned",
            expected=_some(left, desired=True) if left else "as planned",
            fix=_FIX[slowest] if left else None,
        )


def _some(steps: list[Step], desired: bool) -> str:
    """The first steps as text; values unknown for a common reason give that reason once."""
    reasons = {step.now for step in steps if isinstance(step.now, Unknown)}
    if not desired and len(reasons) == 1 and all(isinstance(s.now, Unknown) for s in steps):
        return str(reasons.pop())
    parts = [_text(step, step.desired if desired else step.now) for step in steps[:_SHOWN]]
    more = len(steps) - _SHOWN
    return "; ".join(parts) + (f"; and {more} more" if more > 0 else "")


def _text(step: Step, value: Fact[str | None]) -> str:
    if isinstance(value, Unknown):
        return f"{step.target} is unknown: {value.reason}"
    return f"{step.target} is {'not set' if value is None else value}"


# -- Report facts that could not be read, so that a check without data does not look like a passed one.


#: Maximum number of files named in one finding; the facts list all.


def unknown(scene: Scene) -> Iterator[Finding]:
    """One finding per reason, as a container can deny access to hundreds of files.

    A daemon that runs but does not answer counts as an unreadable file.
    """
    paths: dict[tuple[str, str | None], list[str]] = {}
    for fact in (*scene.facts.unknown(), *scene.live.unanswered()):
        paths.setdefault((fact.reason, fact.fix), []).append(fact.path)
    for (reason, fix), refused in paths.items():
        more = f" and {len(refused) - _SHOWN} more" if len(refused) > _SHOWN else ""
        yield Finding(
            id="unknown-fact",
            status="warn",
            found=f"{', '.join(refused[:_SHOWN])}{more}: {reason}",
            expected="files that can be read and made sense of, daemons that answer",
            fix=fix or "run it as root, on the host itself and not in a container",
        )

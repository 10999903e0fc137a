"""The VM to measure in (pure): its domain on an overlay of the image, placed by the host's plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from netplugin.api.errors import InvalidRequest
from netplugin.api.models import DomainPolicy
from netplugin.host.cpus import format_list, parse_list
from netplugin.host.ssh import SshTarget
from netplugin.libvirt.domain import parse_domain, written
from netplugin.libvirt.image_domain import HOST, USER, domain
from netplugin.libvirt.vm_image import KEY, KNOWN_HOSTS, Image
from netplugin.tuning.facts import Cpus, Facts, Live
from netplugin.tuning.placing.capacity import ground_of, held, pinned_by_others, running
from netplugin.tuning.placing.render import render_placed
from netplugin.tuning.planning.plan import TuningPlan
from netplugin.tuning.steps import needed
from netplugin.tuning.verifying.result import GuestVm

STEP = "verify-guest"
#: Name of the domain. It is the same for every run, so that a run finds what a killed one left.
NAME = "netplugin-verify"
#: Flags of isolcpus that are no CPUs (Documentation/admin-guide/kernel-parameters.txt).
_FLAGS = ("nohz", "domain", "managed_irq")


@dataclass(frozen=True)
class Machine:
    """A VM as it will be started. ``pins`` is empty if it is not placed."""

    image: Image
    xml: str
    ssh: SshTarget
    pins: Mapping[int, int]
    realtime: bool
    emulated: bool

    def described(self, kernel: str) -> GuestVm:
        """Return what is kept with the figures. ``kernel``: release of the kernel that runs in the VM."""
        made = self.image.manifest
        return GuestVm(
            image=made.tree,
            origin=made.origin,
            kernel=kernel,
            arguments=made.arguments,
            vcpus=made.vcpus,
            memory_mb=made.memory_mb,
            emulated=self.emulated,
            pins=dict(self.pins),
            realtime=self.realtime,
        )


def machine_on(
    image: Image, ssh_port: int, emulate: bool, plan: TuningPlan | None, facts: Facts, live: Live
) -> Machine:
    """Return the VM; without a plan it is not placed.

    Raises: Conflict, CapacityExhausted if the plan has no room for it, BackendUnavailable if libvirt does not
    say which CPUs other VMs have.
    """
    made = image.manifest
    xml = domain(
        NAME,
        image.folder,
        made.vcpus,
        made.memory_mb,
        made.arguments,
        image.overlay(NAME),
        image.console(NAME),
        ssh_port,
        emulate,
    )
    pins: Mapping[int, int] = {}
    if plan is not None:
        xml, pins = _placed(xml, plan, facts, live)
    keys = str(image.folder / KEY), str(image.folder / KNOWN_HOSTS)
    realtime = plan is not None and plan.intent.realtime
    return Machine(image, xml, SshTarget(HOST, ssh_port, USER, *keys), pins, realtime, emulate)


def _placed(xml: str, plan: TuningPlan, facts: Facts, live: Live) -> tuple[str, Mapping[int, int]]:
    root = parse_domain(xml, STEP)
    others = held((), pinned_by_others(running(live, STEP), needed(facts.cpus.online), NAME))
    policy = DomainPolicy(pin=True, realtime=plan.intent.realtime)
    placement = render_placed(root, (), policy, ground_of(plan, facts), others)
    return written(root), placement.pins


def measured_vcpus(image: Image, asked: str | None) -> str:
    """Return the vCPUs to measure: those requested, else those that the guest's kernel isolates, else all.

    Raises: InvalidRequest naming ``cpus``.
    """
    every = frozenset(range(image.manifest.vcpus))
    if asked is None:
        return format_list(isolated(image.manifest.arguments) & every or every)
    try:
        named = frozenset(parse_list(asked))
    except ValueError:
        named = frozenset()
    if not named or not named <= every:
        raise InvalidRequest(
            f"cpus: {asked} is no list of the VM's vCPUs, which are {format_list(every)}",
            step=STEP,
            fix="write it like 1-3, or leave it away for the isolated ones",
        )
    return format_list(named)


def isolated(arguments: str) -> Cpus:
    """Return the CPUs of ``isolcpus`` on a kernel command line; none if it cannot be read."""
    values = [word.partition("=")[2] for word in arguments.split() if word.startswith("isolcpus=")]
    parts = [part for part in (values[-1].split(",") if values else ()) if part not in _FLAGS]
    try:
        return frozenset(parse_list(",".join(parts))) if parts else frozenset()
    except ValueError:
        return frozenset()

"""Live migration: a step for one port, and what does not fit between its host and this one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from agents.host.health import Health
from agents.host.vfs import SharedVfs
from agents.operations.ports import PortOperations
from agents.ports.migration import outcome
from netplugin.api.domain_models import RenderRequest
from netplugin.api.errors import Conflict, NetpluginError
from netplugin.api.migration_models import MigrateCheck, MigrateRequest
from netplugin.api.models import BackendInfo, Finding, Port

#: Fields of a spec that the guest's device has, or that are the VM itself: the same on both hosts.
_SAME = ("vm_id", "mac", "backend", "queues", "rx_queue_size", "tx_queue_size")
#: Facts of a backend that change which features a virtio device offers; QEMU refuses another set.
_OFFERED = ("userspace_tso",)
_VHOST_USER = "vhost_postcopy"


@dataclass
class Migrations:
    _ports: PortOperations
    _health: Health
    _vfs: SharedVfs
    #: Raises why this host cannot place a VM (see ``Domains``).
    _would_place: Callable[[str, RenderRequest], Awaitable[None]]

    async def check(self, request: MigrateCheck) -> list[Finding]:
        """What does not fit between the port on the source and the one that this host would have."""
        infos = {info.name: info for info in await self._health.backends()}
        refused: str | None = None
        try:
            self._ports.check_step(request.port_id, request.port)
            await self._health.validate(request.port)
        except NetpluginError as error:
            refused = error.detail
        unplaced: NetpluginError | None = None
        if request.domain is not None:
            try:
                await self._would_place(request.port.vm_id, request.domain)
            except NetpluginError as error:
                unplaced = error
        moves = infos.get(self._ports.teams.backend) if request.port.vf.teaming else None
        here = infos.get(request.port.backend)
        return compared(request, here, refused, moves=moves, unplaced=unplaced)

    async def step(self, port_id: str, request: MigrateRequest) -> Port | None:
        """Carry out a step. Returns the port; None if it was removed, or there is none to remove.

        Raises: Conflict if the step does not follow the phase of the port, NotFound, Unsupported, and
        what a PUT raises.
        """
        ports = self._ports
        ports.check_step(port_id, request.port)
        if ports.teams.concerns(port_id, request.port):
            if request.phase == "leave":
                await self._require_detached(port_id)
            record = await ports.teams.migrate(port_id, request, ports.migrate_alone)
        elif request.port is None and ports.backend_of(port_id) is None:
            outcome(request.phase, request.activation, None, None, datetime.now(UTC))
            record = None
        else:
            record = await ports.migrate_alone(port_id, request)
        return None if record is None else ports.describe(record)

    async def _require_detached(self, port_id: str) -> None:
        """Raises: Conflict if a VM has the VF of this port, with which it cannot be migrated."""
        for vf in await self._vfs.all():
            if vf.port_id == port_id and vf.state == "allocated":
                raise Conflict(
                    f"VF {vf.pci_address} is in use: the VM cannot be migrated with it",
                    step="migrate",
                    port_id=port_id,
                    fix="detach the VF from the VM (virsh detach-device --live), and wait until it has gone",
                )


# -- what does not fit (pure) -----------------------------------------------------------------------


def compared(
    request: MigrateCheck,
    here: BackendInfo | None,
    refused: str | None,
    *,
    moves: BackendInfo | None = None,
    unplaced: NetpluginError | None = None,
) -> list[Finding]:
    """The findings, ``ok`` ones included. ``here``: the backend on this host; None: it is not enabled.

    ``refused`` is why this host would refuse the port. ``moves``: the backend of the NIC that the VM
    migrates with, if that is the standby of a VF. ``unplaced`` is why this host cannot place the VM.
    """
    found = [*_backend(request, here, refused), *_steps(moves or here), *_spec(request)]
    if request.domain is not None:
        found.append(_placement(unplaced))
    if here is not None:
        found += [*_features(request, here), *_postcopy(request, here)]
    return found


def _finding(name: str, fits: bool, found: str, expected: str, fix: str) -> Finding:
    return Finding(
        id=f"migrate-{name}",
        status="ok" if fits else "fail",
        found=found,
        expected=expected,
        fix=None if fits else fix,
    )


def _backend(request: MigrateCheck, here: BackendInfo | None, refused: str | None) -> Iterator[Finding]:
    name = request.port.backend
    usable = here is not None and here.usable
    why = here.reason if here is not None else "it is not in [agent] enabled_backends"
    yield _finding(
        "backend",
        usable,
        f"backend {name} is {'usable' if usable else f'not usable here: {why}'}",
        f"backend {name} is usable on the destination",
        (here and here.fix) or "enable it on the destination",
    )
    yield _finding(
        "port",
        refused is None,
        refused or "the destination takes the port",
        "the destination takes the port",
        "see what was found",
    )


def _steps(here: BackendInfo | None) -> Iterator[Finding]:
    moves = here is not None and here.features.live_migration
    name = f"backend {here.name}" if here is not None else "a backend that is not enabled"
    if here is not None and not moves and "mode" in here.facts:
        name += f" in {here.facts['mode']} mode"
    yield _finding(
        "steps",
        moves,
        f"{name} {'migrates' if moves else 'does not migrate'} ports",
        "features.live_migration is true",
        "plug the port by PUT on the destination, and DELETE it on the source; or ask for a VF with "
        "vf.teaming",
    )


def _placement(unplaced: NetpluginError | None) -> Finding:
    return _finding(
        "placement",
        unplaced is None,
        unplaced.detail if unplaced else "this host has what the VM's policy asks for",
        "the VM can be placed on the destination",
        (unplaced and unplaced.fix) or "see what was found",
    )


def _spec(request: MigrateCheck) -> Iterator[Finding]:
    here, there = request.port, request.source
    differing = [name for name in _SAME if getattr(here, name) != getattr(there, name)]
    differing += ["network.mtu"] if here.network.mtu != there.network.mtu else []
    yield _finding(
        "device",
        not differing,
        f"{', '.join(differing)} differ" if differing else "the guest's device is the same on both hosts",
        "the same VM, MAC, backend, MTU, queues and rings on both hosts",
        "prepare the port with the values of the source",
    )


def _features(request: MigrateCheck, here: BackendInfo) -> Iterator[Finding]:
    for name in _OFFERED:
        if name in here.facts and name in request.source_facts:
            one, other = here.facts[name], request.source_facts[name]
            yield _finding(
                name.replace("_", "-"),
                one == other,
                f"{name} is {one} here and {other} on the source",
                f"{name} is the same on both hosts, as it decides what a virtio device offers",
                "set it alike on both hosts, and restart OVS there",
            )


def _postcopy(request: MigrateCheck, here: BackendInfo) -> Iterator[Finding]:
    facts = {"the destination": here.facts, "the source": request.source_facts}
    without = [host for host, each in facts.items() if each.get(_VHOST_USER) is False]
    if request.postcopy and _VHOST_USER in here.facts:
        yield _finding(
            "postcopy",
            not without,
            f"OVS on {' and '.join(without)} has it off" if without else "OVS has it on",
            "other_config:vhost-postcopy-support=true, as postcopy with vhost-user needs",
            "ovs-vsctl set Open_vSwitch . other_config:vhost-postcopy-support=true, and restart "
            "ovs-vswitchd; or migrate by precopy",
        )

"""The calls of ZStack's management node, as operations of the agent (docs/zstack.md).

What a NIC becomes is decided by the mapping that the plug-in of kvmagent has too.
"""

# The mapping is written for Python 2.7 too, which has no annotations.
# mypy: disallow-untyped-calls=False
from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from agents.service import Service
from netplugin.api import zstack_mapping as mapping
from netplugin.api import zstack_models as models
from netplugin.api.batch_models import PortFilter
from netplugin.api.errors import (
    BackendUnavailable,
    CapacityExhausted,
    Conflict,
    FieldError,
    HostError,
    InvalidRequest,
    NetpluginError,
    NotFound,
)
from netplugin.api.field_errors import invalid
from netplugin.api.models import Port, PortSpec, ReconcileRequest
from netplugin.api.physical_models import OvsUplinkSpec, PhysicalNetworkSpec
from netplugin.api.pmd_models import PmdRequest
from netplugin.host.safe_files import read_own

LOG = logging.getLogger(__name__)
SOFTWARE, VDPA = "dpdkvhostuser", "vdpa"


@dataclass(frozen=True)
class Bond:
    """A bond of dpdk-bond.yaml; its mode and LACP as ZStack writes them."""

    mode: object
    lacp: object
    slaves: tuple[str, ...]


class ZstackCalls:
    """Each method is a call; ``options`` is the group [zstack]."""

    def __init__(self, service: Service, options: Any) -> None:
        self._service = service
        self._options = options
        # When a port was plugged (time.monotonic()); those of an earlier run of the agent: when this began.
        self._plugged: dict[str, float] = {}
        self._started = time.monotonic()

    # -- bridges ---------------------------------------------------------------------------------

    async def create_bridge(self, command: models.BridgeCommand) -> models.Answer:
        """Make the physical network of a bridge; OVS keeps running."""
        await self._require(SOFTWARE)
        await self._prepared(command.bridgeName, command.physicalInterfaceName, command.mtu)
        return models.Answer()

    async def check_bridge(self, command: models.BridgeCommand) -> models.Answer:
        """Check that a bridge has its uplink, with or without VMs."""
        await self._require(SOFTWARE)
        network = await self._network(command.bridgeName)
        await asyncio.to_thread(self._require_uplink, network, command.physicalInterfaceName)
        return models.Answer()

    async def delete_bridge(self, command: models.BridgeName) -> models.Answer:
        """Remove the physical network of a bridge; a conflict while ports are on it."""
        network = await self._found(command.bridgeName)
        if network is not None:
            await self._service.physical_networks.delete(network["name"])
        return models.Answer()

    async def _prepared(self, bridge: str, interface: str, mtu: int | None = None) -> dict[str, Any]:
        """The physical network of a bridge, which is made if there is none. Raises: NetpluginError."""
        network = await self._found(bridge)
        if network is not None:
            await asyncio.to_thread(self._require_uplink, network, interface)
            return network
        devices, mode = await asyncio.to_thread(self._devices, interface)
        with _named():
            ovs = OvsUplinkSpec.model_validate({"devices": devices, "bond": mode})
            mtu = mtu or self._options.mtu
            spec = PhysicalNetworkSpec(bridge=bridge, mtu=mtu, keep=True, ovs=ovs)
        made = await self._service.physical_networks.put(bridge, spec)
        return made.model_dump(mode="json")

    async def _all_networks(self) -> list[dict[str, Any]]:
        """The physical networks with a bridge of OVS, as the API lists them."""
        read = self._service.physical_networks.all
        found = await self._service.off_loop.look(read, "physical networks")
        return [network.model_dump(mode="json") for network in found if network.bridge and network.ovs]

    async def _found(self, bridge: str) -> dict[str, Any] | None:
        """The physical network that has a bridge."""
        return next((each for each in await self._all_networks() if each["bridge"] == bridge), None)

    async def _network(self, bridge: str) -> dict[str, Any]:
        network = await self._found(bridge)
        if network is None:
            fix = "create it, or put the bridge into [ovs] bridge_mappings"
            raise NotFound(f"no physical network has the bridge {bridge}", step="lookup", fix=fix)
        return network

    def _bond(self, interface: str) -> Bond | None:
        """It reads a file."""
        return read_bonds(Path(self._options.bond_file)).get(interface)

    def _devices(self, interface: str) -> tuple[list[str], str | None]:
        """The devices of an interface or a bond, and the mode of the bond. It reads sysfs."""
        with _named():
            found: tuple[list[str], str | None] = mapping.devices_of(
                interface, self._options.interfaces, self._bond(interface)
            )
        return found

    def _require_uplink(self, network: dict[str, Any], interface: str) -> None:
        """Raises: Conflict. It reads sysfs."""
        if not mapping.carries(network, interface, self._options.interfaces, self._bond(interface)):
            has = ", ".join(mapping.uplinks(network)) or "none"
            why = f"bridge {network['bridge']} has the uplink {has}, not {interface}"
            raise Conflict(why, step="validate")

    # -- NICs ------------------------------------------------------------------------------------

    async def generate_vdpa(self, command: models.NicsCommand) -> models.VdpaAnswer:
        """Plug the vDPA NICs of a VM and return the paths of their sockets."""
        ports = await self._plug(command, "vDPA")
        return models.VdpaAnswer(vdpaPaths=[str(getattr(port.binding, "socket_path", "")) for port in ports])

    async def add_vhost_user(self, command: models.NicsCommand) -> models.Answer:
        """Plug the vhost-user NICs of a VM."""
        await self._plug(command, "dpdkvhostuserclient")
        return models.Answer()

    async def delete_vdpa(self, command: models.NicName) -> models.Answer:
        """Unplug a vDPA NIC, or all of a VM."""
        return await self._unplug(command, VDPA)

    async def delete_vhost_user(self, command: models.NicName) -> models.Answer:
        """Unplug a vhost-user NIC, or all of a VM."""
        return await self._unplug(command, SOFTWARE)

    async def _plug(self, command: models.NicsCommand, kind: str) -> list[Port]:
        """Plug the NICs of a type; if one fails, those that are new are removed again."""
        nics = {index: nic for index, nic in enumerate(command.nics) if nic.type == kind}
        specs = {
            nic.nicInternalName: await self._spec(command.vmUuid, nic, f"nics.{index}")
            for index, nic in nics.items()
        }
        new = [name for name in specs if not self._exists(name)]  # of whichever VM
        try:
            return await _all([self._put(name, spec) for name, spec in specs.items()])
        except NetpluginError:
            try:
                await _all([self._service.delete(name) for name in new])
            except NetpluginError as error:
                LOG.warning("VM %s: a NIC of a call that failed stays: %s", command.vmUuid, error)
            raise

    async def _spec(self, vm_uuid: str, nic: models.Nic, place: str) -> PortSpec:
        """Raises: NotFound, InvalidRequest naming the field; ``place`` is that of the NIC in the body."""
        network = await self._network(nic.bridgeName)
        with _named(place):
            fields = mapping.port_spec(vm_uuid, nic, self._options, network["name"])
            return PortSpec.model_validate(fields)

    def _exists(self, name: str) -> bool:
        try:
            self._service.port(name)
        except NotFound:
            return False
        return True

    async def _put(self, name: str, spec: PortSpec) -> Port:
        port = await self._service.put(name, spec)
        self._plugged[name] = time.monotonic()
        return port

    async def _unplug(self, command: models.NicName, backend: str) -> models.Answer:
        ports = self._service.ports(PortFilter(vm_id=command.vmUuid, backend=backend))
        names = [port.port_id for port in ports if command.nicInternalName in (None, port.port_id)]
        await _all([self._service.delete(name) for name in names])
        return models.Answer()

    # -- all of the host -------------------------------------------------------------------------

    async def sync(self, command: models.SyncCommand) -> models.SyncAnswer:
        """Make and repair the bridges and NICs that are listed.

        NICs with a name of ZStack's that are not listed are removed if no VM is connected to them.
        Bridges and ports that are not the agent's are never touched.
        """
        failures: list[str] = []
        networks: set[str] = set()
        for index, bridge in enumerate(command.ovsBridgeInfo):
            try:
                network = await self._prepared(bridge.name, bridge.physicalInterface)
            except NetpluginError as error:
                failures.append(f"{bridge.name}: {_sentence(error)}")
                continue
            networks.add(network["name"])
            failures += await _failures(
                (nic.nicInternalName, self._synced(nic, f"ovsBridgeInfo.{index}.ports.{number}"))
                for number, nic in enumerate(bridge.ports or ())
            )
        report = await self._service.reconcile(ReconcileRequest())
        failures += [problem.detail for problem in report.errors]
        listed = {nic.nicInternalName for bridge in command.ovsBridgeInfo for nic in bridge.ports or ()}
        stale, kept = self._unlisted(networks, listed)
        failures += await _failures((name, self._service.delete(name)) for name in stale)
        if failures:
            raise HostError(f"{len(failures)} failed: {'; '.join(failures)}", step="sync")
        changes = [change.detail for change in report.changes]
        return models.SyncAnswer(changes=changes, removed=stale, kept=kept)

    async def _synced(self, nic: models.NicOfVm, place: str) -> None:
        await self._put(nic.nicInternalName, await self._spec(nic.vmUuid, nic, place))

    def _unlisted(self, networks: set[str], listed: set[str]) -> tuple[list[str], list[str]]:
        """NICs of ZStack on these networks that it does not list: to be removed, and in use."""
        now = time.monotonic()
        stale: list[str] = []
        kept: list[str] = []
        ports = [port for port in self._service.ports(PortFilter()) if _is_nic(port)]
        self._plugged = {port.port_id: self._plugged.get(port.port_id, self._started) for port in ports}
        for port in ports:
            if port.port_id in listed or port.spec.network.physical_network not in networks:
                continue
            young = now - self._plugged[port.port_id] < mapping.YOUNG_S
            unused = not young and (port.observed or {}).get("connected") is False
            (stale if unused else kept).append(port.port_id)
        return stale, kept

    async def check_resources(self, command: models.ResourceCommand) -> models.ChecksAnswer:
        """Check OVS-DPDK and hugepages, and report what is wrong on the host.

        Hugepages are reserved at boot, not here.
        """
        await self._require(SOFTWARE)
        found_kb = await asyncio.to_thread(reserved_kb)
        if found_kb < (command.reserveSize or 0):
            raise CapacityExhausted(
                f"this host has {found_kb} kB of hugepages, not {command.reserveSize}",
                step="validate",
                fix="reserve them at boot (docs/tuning.md)",
            )
        findings = await self._service.health.checks()
        return models.ChecksAnswer(findings=[finding for finding in findings if finding.status != "ok"])

    async def check_vfs(self, command: models.VfsCommand) -> models.VfsAnswer:
        """Check that vDPA works and that a NIC has its virtual functions; nothing is changed."""
        await self._require(VDPA)
        nic, wanted = command.physicalInterfaceName, command.virtPartNum or 0
        found = sum(vf.pf == nic for vf in await self._service.vfs.all())
        if found < wanted:
            raise Conflict(
                f"{nic} has {found} virtual functions, not {wanted}",
                step="validate",
                fix=f"write {wanted} into its sriov_numvfs (docs/nics.md)",
            )
        return models.VfsAnswer()

    async def leave_vfs(self, command: models.VfsCommand) -> models.Answer:
        """Change nothing: `generate` has changed nothing that could be restored."""
        return models.Answer()

    async def pin_cpus(self, command: models.CpuCommand) -> models.Answer:
        """Set the CPUs of the PMD threads."""
        with _named():
            cpus = mapping.cpus_of(command.ovsCpuPinning)
        await self._service.pmd.set(PmdRequest(cpus=cpus))
        return models.Answer()

    async def check_interfaces(self, command: models.InterfacesCommand) -> models.InterfacesAnswer:
        """Check that interfaces exist, as netdevs, as bonds, or as NICs that DPDK has."""
        networks = await self._all_networks()
        failed = await asyncio.to_thread(self._unknown, command.interfaceNames, networks)
        if not failed:
            return models.InterfacesAnswer()
        error = f"not on this host, and no NIC that DPDK has: {', '.join(failed)}"
        return models.InterfacesAnswer(success=False, error=error, failedInterfaceNames=failed)

    def _unknown(self, names: Sequence[str], networks: list[dict[str, Any]]) -> list[str]:
        bonds = read_bonds(Path(self._options.bond_file))
        return [
            name
            for name in names
            if name not in bonds
            and not mapping.has_netdev(name)
            and not mapping.taken_by_dpdk(name, self._options.interfaces, networks)
        ]

    async def _require(self, backend: str) -> None:
        """Raises: BackendUnavailable with the reason if a backend is not usable now."""
        for found in await self._service.health.backends():
            if found.name == backend:
                if found.usable:
                    return
                raise BackendUnavailable(f"{backend}: {found.reason}", step="usable", fix=found.fix)
        raise BackendUnavailable(
            f"backend {backend} is not enabled", step="usable", fix="[agent] enabled_backends"
        )


def reserved_kb() -> int:
    """The memory in hugepages of all sizes, in kB."""
    found = Path(mapping.SYSFS).glob("kernel/mm/hugepages/hugepages-*kB/nr_hugepages")
    return sum(
        int(file.parent.name[len("hugepages-") : -len("kB")]) * int(file.read_text()) for file in found
    )


def read_bonds(path: Path) -> dict[str, Bond]:
    """The bonds of dpdk-bond.yaml by name; none without the file. Raises: HostError."""
    import yaml  # slow to import

    try:
        entries = yaml.safe_load(read_own(path)) or []
        found = [entry["bond"] for entry in entries]
        return {
            str(bond["name"]): Bond(bond["mode"], bond.get("lacp"), tuple(map(str, bond["slaves"])))
            for bond in found
        }
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError, AttributeError) as wrong:
        raise HostError(
            f"{path} has no bonds that can be read: {wrong!r}", step="validate", fix="correct it"
        ) from None


async def _all(calls: Sequence[Awaitable[Any]]) -> list[Any]:
    """The results of all calls, which are all awaited. Raises: the first error, with the others' texts."""
    done = await asyncio.gather(*calls, return_exceptions=True)
    errors = [result for result in done if isinstance(result, NetpluginError)]
    for result in done:
        if isinstance(result, BaseException) and (len(errors) == 1 or result not in errors):
            raise result
    if errors:
        first, detail = errors[0], "; ".join(_sentence(error) for error in errors)
        raise type(first)(detail, step=first.step, fix=first.fix, port_id=first.port_id, errors=first.errors)
    return done


def _is_nic(port: Port) -> bool:
    return port.spec.backend in mapping.BACKENDS.values() and bool(mapping.NIC_NAME.match(port.port_id))


@contextmanager
def _named(place: str = "") -> Iterator[None]:
    """Name the field that is wrong; ``place`` is that of the object in the body. Raises: InvalidRequest."""
    begin = (place,) if place else ()
    try:
        yield
    except mapping.MappingError as wrong:
        field = FieldError(field=".".join((*begin, wrong.field)), message=wrong.text)
        raise InvalidRequest(wrong.text, step="validate", errors=[field]) from None
    except ValidationError as wrong:
        raise invalid([{**error, "loc": (*begin, *error["loc"])} for error in wrong.errors()]) from None


async def _failures(calls: Iterable[tuple[str, Awaitable[Any]]]) -> list[str]:
    """What the errors of these calls say, each with the name before it."""

    async def failure(name: str, call: Awaitable[Any]) -> str:
        try:
            await call
        except NetpluginError as error:
            return f"{name}: {_sentence(error)}"
        return ""

    return [text for text in await asyncio.gather(*(failure(*call) for call in calls)) if text]


def _sentence(error: NetpluginError) -> str:
    return f"{error.detail}. Fix: {error.fix}" if error.fix else error.detail

"""The NICs of the ends: the drivers that backends need there, and rebinding between cells."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from netplugin.api.errors import Conflict, HostError, NetpluginError
from netplugin.api.models import BackendInfo
from netplugin.api.physical_models import PhysicalNetworkInfo
from netplugin.data_path import uplink_parts
from netplugin.host.links import Links
from netplugin.host.nic_models import KEPT_BY_DPDK
from netplugin.host.vfs import VFIO, Vfs, in_user_space, read_interfaces, read_link, read_text
from netplugin.programs import bounded
from netplugin.programs.polling import polled
from netplugin.tuning.applying.accessor import WritableRoot
from netplugin.tuning.applying.kernel import VfCounts
from netplugin.tuning.steps import VfCount
from netplugin_zeroloss.matrix.findings import Finding
from netplugin_zeroloss.values import UnusableInput

# -- Which NICs a backend has on a network, and which driver it needs there. -----------------------


_PCI = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]\Z")


@dataclass(frozen=True, slots=True)
class NicNeed:
    """A NIC that a backend needs: with DPDK's driver, or with the kernel's."""

    address: str
    backend: str
    dpdk: bool

    def fits(self, driver: str | None) -> bool:
        """Whether the backend can use the NIC with this driver."""
        with_dpdk = in_user_space(driver)
        if self.dpdk:
            return with_dpdk or driver in KEPT_BY_DPDK
        return driver is not None and not with_dpdk


def devices_of(network: PhysicalNetworkInfo, parts: Collection[str]) -> Iterator[str]:
    """Yield the devices of a network in these parts of it: PCI addresses and interfaces."""
    if "ovs" in parts and network.ovs:
        yield from (_plain(entry, ",") for entry in network.ovs.devices)
    if "sriov" in parts and network.sriov:
        yield from (_plain(entry, "#") for entry in network.sriov.devices)
    if "linuxbridge" in parts and network.linuxbridge and network.linuxbridge.interface:
        yield network.linuxbridge.interface


def needs_of(network: PhysicalNetworkInfo, info: BackendInfo, sys: Path) -> Iterator[NicNeed]:
    """Yield the NICs of a backend on a network; not its virtual devices. Raises: NoDataPath."""
    parts = uplink_parts(info.name, info.features.virtual_functions)
    of_dpdk = [device for device in devices_of(network, ("ovs",)) if _PCI.match(device)]
    for name in devices_of(network, parts - {"ovs"}):
        address = address_of(name, sys)
        # Without an interface, DPDK may have the NIC: the one that the network has for DPDK.
        for found in [address] if address else (a for a in of_dpdk if _has_dpdk(a, sys)):
            yield NicNeed(found, info.name, dpdk=False)
    if "ovs" in parts:
        yield from (NicNeed(address, info.name, dpdk=True) for address in of_dpdk)


def _plain(entry: str, mark: str) -> str:
    return entry.partition(mark)[0].lower() if ":" in entry else entry.partition(mark)[0]


def address_of(name: str, sys: Path) -> str | None:
    """The PCI address of a NIC; None for an interface that does not exist or is of no PCI device."""
    if _PCI.match(name):
        return name
    interface = sys / "class/net" / name
    places = interface.resolve().parts if interface.exists() else ()
    return next((place for place in reversed(places) if _PCI.match(place)), None)


def _has_dpdk(address: str, sys: Path) -> bool:
    driver = read_link(sys / "bus/pci/devices" / address / "driver")
    return in_user_space(driver)


# -- Rebinding: from one state of a NIC to another, and back. --------------------------------------


#: Seconds until a device is free, or an interface has appeared.
_WAIT_S = 15.0
_LOOK_S = 0.05
_STEP = "bind-nic"


#: Of a driver or interface, which is a part of a path below /sys.
_FileName = Annotated[str, Field(pattern=r"^([A-Za-z0-9_-][A-Za-z0-9_.-]{0,63})?$")]


@dataclass(frozen=True, slots=True)
class NicState:
    """What a rebind changes. ``override``: ``driver_override``; ``vfs``: their number."""

    driver: _FileName | None
    override: _FileName | None = None
    vfs: Annotated[int, Field(ge=0, le=65_535)] = 0
    interface: _FileName | None = None
    up: bool = False
    mtu: int | None = None

    @property
    def bound(self) -> tuple[str | None, str | None, int]:
        """What must be as before when the run has ended."""
        return self.driver, self.override, self.vfs


_Address = Annotated[str, Field(pattern=r"^[0-9a-f]{4}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]$")]
_FOUND: TypeAdapter[dict[str, NicState]] = TypeAdapter(dict[_Address, NicState])


class Nics:
    """Binds the NICs of a run to the drivers that its cells need, and back to those that they had.

    The states found before the run are in its journal, so that a resumed run knows them.
    """

    def __init__(
        self,
        root: Path,
        ports: Callable[[], Mapping[str, str]],
        found: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        vfs: Vfs | None = None,
        links: Links | None = None,
    ) -> None:
        """``ports``: the agent's port by address of its VF. ``found``: from the journal.

        Raises: UnusableInput if ``found`` is not what ``note`` returned.
        """
        self.sys = root / "sys"
        self._vfs = vfs or Vfs(self.sys)
        self._links = links or Links()
        self._counts = VfCounts(WritableRoot(root), ports)
        try:
            self.found = bounded.validated(found or {}, _FOUND)
        except bounded.Unreadable as error:
            raise UnusableInput("the NICs in the journal", str(error)) from error

    def driver(self, address: str) -> str | None:
        return read_link(self._at(address) / "driver")

    def state(self, address: str) -> NicState:
        """Read the state of a NIC."""
        at = self._at(address)
        override, vfs = read_text(at / "driver_override"), int(read_text(at / "sriov_numvfs") or 0)
        found = NicState(self.driver(address), None if override in ("", "(null)") else override, vfs)
        for first in read_interfaces(at)[:1]:
            mtu = read_text(at / "net" / first.name / "mtu")
            return replace(found, interface=first.name, up=first.up, mtu=int(mtu) if mtu else None)
        return found

    def note(self, needs: Sequence[NicNeed]) -> dict[str, dict[str, Any]]:
        """Record the NICs that some need has with another driver; returns all records, for the journal."""
        for need in needs:
            others = [each for each in needs if each.address == need.address]
            if any(not each.fits(self.driver(need.address)) for each in others):
                self.found.setdefault(need.address, self.state(need.address))
        return {address: asdict(state) for address, state in self.found.items()}

    def obstacles(self, need: NicNeed) -> Iterator[Finding]:
        """Yield what is in the way of binding a NIC to the other driver. Raises: NetpluginError."""
        address, device = need.address, self._at(need.address)
        if need.dpdk and not (self.sys / "bus/pci/drivers" / VFIO).exists():
            yield Finding("nic", f"the kernel module {VFIO} is not loaded", f"modprobe {VFIO}")
        if need.dpdk and not (device / "iommu_group").exists():
            fix = "switch the IOMMU on: netplugin host plan has the kernel arguments"
            yield Finding("nic", f"{address} has no IOMMU group, which {VFIO} needs", fix)
        addresses = self._links.addresses()
        for interface in read_interfaces(device):
            used = f"the host uses {address}: its interface {interface.name}"
            if given := addresses.get(interface.name):
                fix = f"take another NIC, or ip address flush dev {interface.name}"
                yield Finding("nic", f"{used} has the address {given[0]}", fix)
            if interface.enslaved:
                fix = f"take another NIC, or ip link set {interface.name} nomaster"
                yield Finding("nic", f"{used} is in a bridge or bond", fix)

    def bind(self, need: NicNeed) -> None:
        """Bind a NIC as the backend needs it, if it is bound otherwise.

        Raises: Conflict if the host uses it, or it was not found before the run; NetpluginError.
        """
        address = need.address
        if need.fits(self.driver(address)):
            return
        if address not in self.found:
            why = f"{address} was not bound to another driver when the run began"
            raise Conflict(why, step=_STEP, fix="start the run again: --resume")
        for obstacle in self.obstacles(need):
            raise Conflict(obstacle.found, step=_STEP, fix=obstacle.fix)
        before = self.found[address]
        of_kernel = before.driver is not None and not in_user_space(before.driver)
        self._bind(address, NicState(VFIO, VFIO) if need.dpdk else before if of_kernel else NicState(""))
        if not need.fits(driver := self.driver(address)):
            why = f"{address} is bound to {driver or 'no driver'} and not as {need.backend} needs it"
            raise HostError(why, step=_STEP, fix=f"journalctl -k --grep {address}")

    def hides(self, interface: str) -> bool:
        """Whether there is no such interface because the run has bound its NIC to DPDK's driver."""
        if (self.sys / "class/net" / interface).exists():
            return False
        return any(
            # The interface of a NIC that DPDK had before the run is not known.
            before.interface in (interface, None)
            for address, before in self.found.items()
            if _has_dpdk(address, self.sys)
        )

    def put_back(self) -> list[str]:
        """Bind all NICs as they were found; returns those that stay otherwise, with cause and fix."""
        left = []
        for address, before in self.found.items():
            try:
                if self.state(address).bound != before.bound:
                    self._bind(address, before)
                now = self.state(address).bound
                why = "" if now == before.bound else f"driver, override and VFs are {now}"
            except NetpluginError as error:
                why = error.detail
            if why:
                was = f"NIC {address} is not bound to {before.driver or 'no driver'} as before the run"
                left.append(f"{was}: {why}; mend that and run it with --resume, which tries again")
        return left

    def _bind(self, address: str, desired: NicState) -> None:
        """Change to this state; ``driver`` empty: the kernel's choice. Raises: NetpluginError."""
        at, count, rebinds = self._at(address), VfCount(address), self.driver(address) != desired.driver
        if rebinds:
            if (at / "sriov_numvfs").exists():
                self._counts.restore(count, "0")
            _wait(lambda: not self._vfs.is_open(address), f"{address} is free of DPDK")
            self._vfs.override(address, desired.driver or None)
            self._vfs.unbind(address)
            if desired.driver is not None:
                self._vfs.probe(address)
        self._vfs.override(address, desired.override)
        if (name := desired.interface) is not None:
            _wait((at / "net" / name).exists, f"{address} has its interface {name}")
            self._links.set(name, mtu=desired.mtu, up=desired.up)
        if (at / "sriov_numvfs").exists():
            self._counts.restore(count, str(desired.vfs))

    def _at(self, address: str) -> Path:
        return self.sys / "bus/pci/devices" / address


def _wait(there: Callable[[], bool], what: str) -> None:
    """Raises: HostError at the deadline."""
    if not polled(there, bool, _WAIT_S, _LOOK_S):
        raise HostError(f"not within {_WAIT_S:g} s: {what}", step=_STEP)

"""The NICs of the ends: the drivers that backends need there, and rebinding between cells."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
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


def needs_of(network: PhysicalNetworkInfo, info: BackendInfo, sys: Path) -> Iterator[NicNeed]:
    """Yield the NICs of a backend on a network; not its virtual devices. Raises: NoDataPath."""
    backend, parts = info.name, uplink_parts(info.name, info.features.virtual_functions)
    of_dpdk = [d for e in (network.ovs.devices if network.ovs else ()) if _PCI.match(d := _plain(e, ","))]
    names: list[str] = []
    if "sriov" in parts and network.sriov:
        names += (_plain(entry, "#") for entry in network.sriov.devices)
    if "linuxbridge" in parts and network.linuxbridge and network.linuxbridge.interface:
        names.append(network.linuxbridge.interface)
    for name in names:
        address = _address(name, sys)
        # Without an interface, DPDK may have the NIC: the one that the network has for DPDK.
        for found in [address] if address else (a for a in of_dpdk if _has_dpdk(a, sys)):
            yield NicNeed(found, backend, dpdk=False)
    if "ovs" in parts:
        yield from (NicNeed(address, backend, dpdk=True) for address in of_dpdk)


def _plain(entry: str, mark: str) -> str:
    return entry.partition(mark)[0].lower() if ":" in entry else entry.partition(mark)[0]


def _address(name: str, sys: Path) -> str | None:
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


_FOUND: TypeAdapter[dict[str, NicState]] = TypeAdapter(
    dict[Annotated[str, Field(pattern=r"^[0-9a-f]{4}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]$")], NicState]
)


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
        override = read_text(self._at(address) / "driver_override")
        interfaces = read_interfaces(self._at(address))
        first = interfaces[0] if interfaces else None
        mtu = read_text(self._at(address) / "net" / first.name / "mtu") if first else ""
        return NicState(
            driver=self.driver(address),
            override=None if override in ("", "(null)") else override,
            vfs=int(read_text(self._at(address) / "sriov_numvfs") or 0),
            interface=first.name if first else None,
            up=first.up if first else False,
            mtu=int(mtu) if mtu else None,
        )

    def note(self, needs: Sequence[NicNeed]) -> dict[str, dict[str, Any]]:
        """Record the NICs that some need has with another driver; returns all records, for the journal."""
        for need in needs:
            others = [each for each in needs if each.address == need.address]
            if any(not each.fits(self.driver(need.address)) for each in others):
                self.found.setdefault(need.address, self.state(need.address))
        return {address: asdict(state) for address, state in self.found.items()}

    def obstacles(self, need: NicNeed) -> Iterator[Finding]:
        """Yield what is in the way of binding a NIC to the other driver. Raises: NetpluginError."""
        device = self._at(need.address)
        if need.dpdk and not (self.sys / "bus/pci/drivers" / VFIO).exists():
            yield Finding("nic", f"the kernel module {VFIO} is not loaded", f"modprobe {VFIO}")
        if need.dpdk and not (device / "iommu_group").exists():
            yield Finding(
                "nic",
                f"{need.address} has no IOMMU group, which {VFIO} needs",
                "switch the IOMMU on: netplugin host plan has the kernel arguments",
            )
        addresses = self._links.addresses()
        for interface in read_interfaces(device):
            if addresses.get(interface.name):
                yield Finding(
                    "nic",
                    f"the host uses {need.address}: its interface {interface.name} has the address"
                    f" {addresses[interface.name][0]}",
                    f"take another NIC, or ip address flush dev {interface.name}",
                )
            if interface.enslaved:
                yield Finding(
                    "nic",
                    f"the host uses {need.address}: its interface {interface.name} is in a bridge or bond",
                    f"take another NIC, or ip link set {interface.name} nomaster",
                )

    def bind(self, need: NicNeed) -> None:
        """Bind a NIC as the backend needs it, if it is bound otherwise.

        Raises: Conflict if the host uses it, or it was not found before the run; NetpluginError.
        """
        if need.fits(self.driver(need.address)):
            return
        if need.address not in self.found:
            raise Conflict(
                f"{need.address} was not bound to another driver when the run began",
                step="bind-nic",
                fix="start the run again: --resume",
            )
        for obstacle in self.obstacles(need):
            raise Conflict(obstacle.found, step="bind-nic", fix=obstacle.fix)
        before = self.found[need.address]
        if need.dpdk:
            self._bind(need.address, NicState(VFIO, VFIO))
        elif before.driver is not None and NicNeed(need.address, "", dpdk=False).fits(before.driver):
            self._bind(need.address, before)
        else:
            self._bind(need.address, NicState(""))
        if not need.fits(driver := self.driver(need.address)):
            raise HostError(
                f"{need.address} is bound to {driver or 'no driver'} and not as {need.backend} needs it",
                step="bind-nic",
                fix=f"journalctl -k --grep {need.address}",
            )

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
                left.append(
                    f"NIC {address} is not bound to {before.driver or 'no driver'} as before the run: {why};"
                    " mend that and run it with --resume, which tries again"
                )
        return left

    def _bind(self, address: str, desired: NicState) -> None:
        """Change to this state; ``driver`` empty: the kernel's choice. Raises: NetpluginError."""
        count = VfCount(address)
        if (self._at(address) / "sriov_numvfs").exists() and self.driver(address) != desired.driver:
            self._counts.restore(count, "0")
        if self.driver(address) != desired.driver:
            _wait(lambda: not self._vfs.is_open(address), f"{address} is free of DPDK")
            self._vfs.override(address, desired.driver or None)
            self._vfs.unbind(address)
            if desired.driver is not None:
                self._vfs.probe(address)
        self._vfs.override(address, desired.override)
        name = desired.interface
        if name is not None:
            _wait(lambda: (self._at(address) / "net" / name).exists(), f"{address} has its interface {name}")
            self._links.set(name, mtu=desired.mtu, up=desired.up)
        if (self._at(address) / "sriov_numvfs").exists():
            self._counts.restore(count, str(desired.vfs))

    def _at(self, address: str) -> Path:
        return self.sys / "bus/pci/devices" / address


def _wait(there: Callable[[], bool], what: str) -> None:
    """Raises: HostError at the deadline."""
    if not polled(there, bool, _WAIT_S, _LOOK_S):
        raise HostError(f"not within {_WAIT_S:g} s: {what}", step="bind-nic")

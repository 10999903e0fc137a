"""The host's VFs as one backend uses them: read, change, watch for changes by others."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

from pyroute2.netlink import NETLINK_KOBJECT_UEVENT, NETLINK_ROUTE
from pyroute2.netlink.rtnl import RTM_DELLINK, RTM_NEWLINK, RTNLGRP_LINK

from drivers.vf.commands import SetVf, VfChange
from drivers.vf.inventory import Inventory, Setting
from drivers.vf.kernel import VfKernel
from netplugin.api.errors import NetpluginError, OperationTimeout, TryAgain, Unsupported
from netplugin.backend import Change, Claim
from netplugin.host.kernel_events import KernelEventListener, queued, subscribed
from netplugin.host.locks import Locks, NoLocks
from netplugin.host.rtnetlink_messages import received
from netplugin.host.supervisor import Supervisor
from netplugin.host.usability import Usability, Wake
from netplugin.host.vfs import VfBusy, VfRefuses, VfStuck

# -- Wake the agent when another process changes a VF or its NIC, from link and PCI device events.
# The kernel sends a link event when anything changes on a PF or its VFs, without details, and a uevent when
# a PCI device appears, disappears, or changes its driver. Each event triggers a check of the whole pool.


_UEVENT_GROUP = 1  # lib/kobject_uevent.c
_NIC = Wake("a NIC with VFs changed")
_PCI = Wake("PCI devices came, went or changed their driver")
_LOST = Wake("events of NICs were lost")


class VfWatch(KernelEventListener):
    """Listener for link and PCI events. Own changes are given as PCI addresses and interface names."""

    def __init__(
        self, wake: Callable[[Wake], None], interfaces: Callable[[], Collection[str]], supervisor: Supervisor
    ) -> None:
        """``interfaces`` returns the names of the PFs. Raises: OSError if the kernel refuses the sockets."""
        self._interfaces = interfaces
        self._links = subscribed(NETLINK_ROUTE, RTNLGRP_LINK)
        self._devices = subscribed(NETLINK_KOBJECT_UEVENT, _UEVENT_GROUP)
        super().__init__("vf-watch", wake, (self._links, self._devices), supervisor)

    def decode(self, own: frozenset[str] | None) -> Iterator[Wake]:
        names = self._interfaces()
        for message in received(queued(self._links), (RTM_NEWLINK, RTM_DELLINK)):
            if message is None:
                yield _LOST
                continue
            name = message.attributes.text("IFLA_IFNAME")
            if name in names and name not in (own or ()):
                yield _NIC
        for data in queued(self._devices):
            address = pci_address(data)
            if address is not None and address not in (own or ()):
                yield _PCI
            if not data:
                yield _LOST


def pci_address(uevent: bytes) -> str | None:
    """Return the PCI address that a kernel uevent is about; None if it is about another subsystem."""
    fields = dict(part.partition(b"=")[::2] for part in uevent.split(b"\0"))
    if fields.get(b"SUBSYSTEM") != b"pci":
        return None
    return fields.get(b"PCI_SLOT_NAME", b"").decode(errors="replace") or None


# -- Bounded waiting for VFs whose NIC cannot serve requests at the moment. -----------------------


#: How long to wait, in seconds. ice waits 0.8 s for a VF reset, i40e 0.3 s (ice_wait_on_vf_reset,
#: i40e_check_vf_init_timeout); a whole NIC resets within seconds. After that, the change is retried
#: when the port is next checked.
PATIENCE_S = 10.0
#: A problem that did not recur for this many times ``PATIENCE_S`` counts as a new one.
_FORGOTTEN = 3


class Patience:
    """Problems of VFs by PCI address: when each began and when it was last seen."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, float]] = {}

    def lasts(self, address: str) -> bool:
        """Record a problem; return whether it is still within ``PATIENCE_S``."""
        now = time.monotonic()
        since, last = self._seen.get(address, (now, now))
        if now - last > _FORGOTTEN * PATIENCE_S:
            since = now
        self._seen[address] = since, now
        return now - since < PATIENCE_S

    def forget(self, addresses: Collection[str]) -> None:
        """Forget the problems of these VFs."""
        self._seen = {address: seen for address, seen in self._seen.items() if address not in addresses}

    def known(self) -> frozenset[str]:
        """Return the VFs that have a problem."""
        return frozenset(self._seen)


# -- The host's VFs as one backend uses them: read, change, watch for changes by others. ----------


LOG = logging.getLogger(__name__)


class Pool:
    """The VFs of one backend. Not thread-safe, except ``hold``."""

    def __init__(
        self, name: str, kernel: VfKernel, supervisor: Supervisor, locks: Locks | None = None
    ) -> None:
        """``name`` is the backend's. Without ``locks``, this is the only agent."""
        self.kernel = kernel
        self._locks = locks or NoLocks()
        self._name = name
        self._supervisor = supervisor
        self._watch: VfWatch | None = None
        self._interfaces: frozenset[str] = frozenset()
        #: By VF, the optional settings that its NIC does not support (restored values, trust, a zero MAC).
        self._unsupported: dict[str, frozenset[Setting]] = {}
        self._busy, self._hidden = Patience(), Patience()

    def hold(self) -> Usability:
        """Lock the NICs. Usable unless other agents hold all of them. Callable from any thread."""
        found = [self._hold(address) for address in self.kernel.nics()]
        if not found or any(held.usable for held in found):
            return Usability(True)
        return found[0]

    def _hold(self, address: str) -> Usability:
        return self._locks.hold(f"pf/{address}", f"NIC {address}", "take the NIC out of [sriov] devices here")

    def look(self) -> Inventory:
        """Read the whole inventory. One look covers all ports, and a VF carries no mark of its port.

        Raises: HostError, OperationTimeout.
        """
        return self._known(self.kernel.look())

    def look_again(self, seen: Inventory, vfs: Sequence[str]) -> Inventory:
        """Read the NICs of these VFs again after a change; keep the rest of ``seen``.

        Raises: HostError, OperationTimeout.
        """
        nics = {seen.vfs[address].pf for address in vfs if address in seen.vfs}
        return self._known(self.kernel.look_again(seen, nics)) if nics else seen

    def apply(
        self, changes: Sequence[Change], deadline: float
    ) -> tuple[dict[str, NetpluginError], dict[Claim, str]]:
        """Apply the VF changes once each, in order, until ``deadline`` (``time.monotonic``).

        Return the failed ports (``TryAgain`` if the VF is busy) and the VFs to quarantine: those that refuse
        what others accept, and those that were busy for too long. A failure affects only the ports of the
        failed change.

        A driver temporarily refuses requests while the NIC or VF resets, or while it serves another request.
        The kernel sends no event when that ends, and waiting here would delay the ports on all other NICs.
        """
        own = [change for change in changes if isinstance(change, VfChange)]
        for change in own:
            if isinstance(change, SetVf) and not (change.optional or change.unless_with_vm):
                self._unsupported.pop(change.address, None)  # another port has it: retry
        failed: dict[str, NetpluginError] = {}
        unfit: dict[Claim, str] = {}
        busy: set[str] = set()
        touched = frozenset[str]().union(*(change.touches() for change in own))
        with self._watch.suppress_own_events(touched) if self._watch else contextlib.nullcontext():
            for change in own:
                if failed.keys() >= set(change.ports):
                    continue
                try:
                    if time.monotonic() >= deadline:
                        raise OperationTimeout("the time for the operation is over", step="vf")
                    change.apply(self.kernel)
                    continue
                except VfBusy as refused:
                    busy.add(change.address)
                    error = self._judge_busy(change, refused, unfit)
                except NetpluginError as refused:
                    error = refused
                if isinstance(error, Unsupported) and isinstance(change, SetVf) and change.optional:
                    self._note_unsupported(change, error)
                    continue
                if isinstance(error, VfRefuses):
                    unfit[change.claimed] = error.detail
                failed.update({port: error.for_port(port) for port in change.ports})
        self._busy.forget({change.address for change in own} - busy)
        return failed, unfit

    def _note_unsupported(self, change: SetVf, error: NetpluginError) -> None:
        LOG.warning("the NIC does not support it: %s: %s", change.describe(), error.detail)
        settings = {Setting.of(group, change.attributes) for group in change.groups}
        known = self._unsupported.get(change.address, frozenset())
        self._unsupported[change.address] = known | settings

    def _judge_busy(self, change: VfChange, busy: VfBusy, unfit: dict[Claim, str]) -> NetpluginError:
        if self._busy.lasts(change.address):
            return TryAgain(busy.detail, step=busy.step, fix=busy.fix)
        # Do not forget it: an observation may reach the limit before the waiting call does.
        if isinstance(busy, VfStuck):
            unfit[change.claimed] = busy.detail
        detail = f"{busy.detail}: it did not end in time"
        return OperationTimeout(detail, step=busy.step, fix=busy.fix)

    def watch(self, wake: Callable[[Wake], None]) -> None:
        """Call ``wake`` when another process changes a VF or its NIC."""
        try:
            self._watch = VfWatch(wake, lambda: self._interfaces, self._supervisor)
        except OSError as refused:
            LOG.warning("%s: no events of NICs, so only periodic reads find drift: %s", self._name, refused)

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _known(self, inventory: Inventory) -> Inventory:
        """Add the facts that the kernel does not report: locks, awaited VFs, unsupported settings."""
        self._interfaces = frozenset(pf.name for pf in inventory.pfs.values())
        pfs = {a: replace(pf, held=self._hold(a)) for a, pf in inventory.pfs.items()}
        hidden = {a for a, vf in inventory.vfs.items() if inventory.hides(vf)}
        self._hidden.forget(self._hidden.known() - hidden)
        vfs = dict(inventory.vfs)
        for address in hidden:
            vfs[address] = replace(vfs[address], is_awaited=self._hidden.lasts(address))
        for address in self._unsupported.keys() & vfs.keys():
            vfs[address] = replace(vfs[address], unsupported=self._unsupported[address])
        return replace(inventory, pfs=pfs, vfs=vfs)


def changed_vfs(changes: Sequence[Change]) -> list[str]:
    """Return the PCI addresses of the VFs that the changes affect."""
    return [change.address for change in changes if isinstance(change, VfChange)]

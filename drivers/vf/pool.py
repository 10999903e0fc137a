"""The host's VFs as one backend uses them: read, change, watch for changes by others."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from drivers.vf.apply import Done, apply_changes, touched
from drivers.vf.changes import SetVf, VfChange
from drivers.vf.inventory import Inventory, Setting
from drivers.vf.kernel import Kernel
from drivers.vf.patience import Patience
from drivers.vf.watch import Watch
from netplugin.backend import Change, Claim, Usability, Wake
from netplugin.errors import NetpluginError, OperationTimeout, TryAgain
from netplugin.host.locks import Locks, NoLocks
from netplugin.host.supervisor import Supervisor
from netplugin.host.vfs import VfStuck

LOG = logging.getLogger(__name__)


class Pool:
    """The VFs of one backend. Not thread-safe, except ``hold``."""

    def __init__(
        self, name: str, kernel: Kernel, supervisor: Supervisor, locks: Locks | None = None
    ) -> None:
        """``name`` is the backend's. Without ``locks``, this is the only agent."""
        self.kernel = kernel
        self._locks = locks or NoLocks()
        self._name = name
        self._supervisor = supervisor
        self._watch: Watch | None = None
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
        return self._locks.hold(
            f"pf/{address}", f"NIC {address}", "take the NIC out of [sriov] devices here"
        )

    def look(self) -> Inventory:
        """Read the whole inventory. One dump covers all ports, and a VF carries no mark of its port.

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
        """Apply changes. Return the failed ports (``TryAgain`` if the VF is busy) and the VFs to quarantine:
        those that refuse what others accept, and those that were busy for too long."""
        quiet = self._watch.quiet(touched(changes)) if self._watch else contextlib.nullcontext()
        with quiet:
            done = apply_changes(self.kernel.carry_out, changes, deadline)
        for change in changes:
            if isinstance(change, SetVf) and not (change.optional or change.unless_with_vm):
                self._unsupported.pop(change.address, None)  # another port has it: retry
        for change, why in done.unsupported.items():
            LOG.warning("the NIC does not support it: %s: %s", change.describe(), why)
            settings = {Setting.of(group, change.attributes) for group in change.groups}
            known = self._unsupported.get(change.address, frozenset())
            self._unsupported[change.address] = known | settings
        self._judge_busy(changes, done)
        return done.failed, done.unfit

    def _judge_busy(self, changes: Sequence[Change], done: Done) -> None:
        busy = {change.address for change in done.busy}
        self._busy.forget(set(changed_vfs(changes)) - busy)
        for change, why in done.busy.items():
            error: NetpluginError
            if self._busy.lasts(change.address):
                error = TryAgain(why.detail, step=why.step)
            else:
                error = OperationTimeout(f"{why.detail}: it did not end in time", step=why.step)
                # Do not forget it: an observation may reach the limit before the waiting call does.
                if isinstance(why, VfStuck):
                    done.unfit[change.thing] = why.detail
            done.failed.update({port: error.for_port(port) for port in change.ports})

    def watch(self, wake: Callable[[Wake], None]) -> None:
        """Call ``wake`` when another process changes a VF or its NIC."""
        try:
            self._watch = Watch(wake, lambda: self._interfaces, self._supervisor)
        except OSError as refused:
            LOG.warning("%s: no news of NICs, drift is found by looking: %s", self._name, refused)

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

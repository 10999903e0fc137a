"""Set the number of VFs of a PF. The kernel requires 0 VFs between two other numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from netplugin.errors import Conflict, HostError
from netplugin.tuning.applying.place import Raw
from netplugin.tuning.applying.refusals import refusals
from netplugin.tuning.applying.vf_use import vf_uses
from netplugin.tuning.applying.writable import WritableRoot
from netplugin.tuning.read.network import PCI
from netplugin.tuning.root import Unknown
from netplugin.tuning.steps import VfCount

#: Returns the agent's port ids by VF address; empty if no agent runs.
#: Raises: NetpluginError if an agent runs but does not answer.
Ports: TypeAlias = Callable[[], Mapping[str, str]]


class VfCounts:
    """Raw value: the number. New VFs do not inherit the settings of the old ones."""

    def __init__(self, root: WritableRoot, ports: Ports) -> None:
        self._root, self._ports = root, ports

    def read(self, target: VfCount) -> Raw:
        text = self._root.text(_path(target))
        if isinstance(text, Unknown):
            raise HostError(f"{text.path}: {text.reason}", step="read")
        return text

    def value(self, target: VfCount, raw: Raw) -> str | None:
        return raw

    def write(self, target: VfCount, wanted: str | None) -> None:
        self.restore(target, wanted)

    def restore(self, target: VfCount, raw: Raw) -> None:
        """Set the number, through 0 if VFs exist. Raises: Conflict if an existing VF is in use."""
        now, wanted = self.read(target) or "0", raw or "0"
        if now == wanted:
            return
        path = _path(target)
        if now != "0":
            self._refuse_in_use(target, int(now))
            with refusals(path):
                self._root.write(path, "0")
        if wanted != "0":
            with refusals(path):
                self._root.write(path, wanted)

    def _refuse_in_use(self, target: VfCount, number: int) -> None:
        uses = list(vf_uses(self._root, target.address, number, self._ports()))
        if uses:
            first = uses[0]
            others = {use.address for use in uses} - {first.address}
            also = f"; so are {', '.join(sorted(others))}" if others else ""
            same = [use for use in uses if use.address == first.address]
            raise Conflict(
                f"VF {first.address} of {target.address} is in use: "
                f"{' and '.join(use.how for use in same)}{also}",
                step="write",
                fix=f"free VF {first.address}: {', and '.join(use.end for use in same)}; then try again",
            )  # fmt: skip


def _path(target: VfCount) -> str:
    return f"{PCI}/{target.address}/sriov_numvfs"

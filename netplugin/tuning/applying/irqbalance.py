"""CPUs banned from irqbalance: a line in its environment file; irqbalance is restarted if it runs."""

from __future__ import annotations

import re
from collections.abc import Callable

from netplugin.errors import BackendUnavailable, HostError
from netplugin.host.cpus import format_list
from netplugin.tuning.applying.config_lines import last_line, value_of, with_line
from netplugin.tuning.applying.place import Raw
from netplugin.tuning.applying.programs import Run
from netplugin.tuning.applying.refusals import refusals
from netplugin.tuning.applying.writable import WritableRoot
from netplugin.tuning.facts import Cpus
from netplugin.tuning.masks import to_kernel
from netplugin.tuning.read.cpus import cpu_list
from netplugin.tuning.read.interrupts import banned_cpus, masked_cpus
from netplugin.tuning.steps import BannedCpus

_NAME = "IRQBALANCE_BANNED_CPULIST"
#: First version that reads the list (irqbalance commit 677b686e223c).
_LEAST = (1, 8)
_RESTART_S, _VERSION_S = 60.0, 10.0


class Irqbalance:
    """Raw value: the last line that sets the list, empty if none does, None if there is no file."""

    def __init__(self, root: WritableRoot, run: Run) -> None:
        self._root, self._run = root, run

    def read(self, target: BannedCpus) -> Raw:
        return last_line(_NAME, self._text(target))

    def value(self, target: BannedCpus, raw: Raw) -> str | None:
        text = value_of(raw)
        try:
            return text and format_list(banned_cpus(f"{_NAME}={text}") or ())
        except ValueError:
            return text

    def write(self, target: BannedCpus, wanted: str | None) -> None:
        """Set the list. Raises: HostError if irqbalance is too old for it or the older variable, a mask,
        overrides it. A mask of the same CPUs is accepted: every version reads it."""
        version = self._version()
        if version and version < _LEAST and self._in_words(target, masked_cpus) != wanted:
            mask = f"IRQBALANCE_BANNED_CPUS={to_kernel(cpu_list(wanted or ''))}"
            raise HostError(
                f"irqbalance {'.'.join(map(str, version))} does not know {_NAME}, which is of 1.8",
                step="apply", fix=f"install a newer one, or set {mask} in {target.path}; once the kernel has "
                "isolated them, it leaves them alone by itself",
            )  # fmt: skip
        self.restore(target, f"{_NAME}={wanted}")
        if self._in_words(target, banned_cpus) != wanted:
            raise HostError(
                f"{target.path} has IRQBALANCE_BANNED_CPUS, which goes before {_NAME}",
                step="read-back", fix="remove it: irqbalance has replaced it by the list; or, where a tuned "
                "before 2.24 wrote it, let that write these CPUs: tuned-adm profile",
            )  # fmt: skip

    def restore(self, target: BannedCpus, raw: Raw) -> None:
        text = self._text(target)
        changed = with_line(_NAME, text or "", raw)
        if changed == text or (text is None and not changed):
            return
        with refusals(target.path):
            self._root.replace(target.path, changed)
        # irqbalance reads the file only at start; try-restart does not start it if it is stopped.
        self._run(["systemctl", "try-restart", "irqbalance.service"], _RESTART_S)

    def _version(self) -> tuple[int, ...] | None:
        """The installed version, or None without irqbalance, when nothing reads the file."""
        try:
            words = self._run(["irqbalance", "--version"], _VERSION_S)
        except BackendUnavailable:
            return None
        except HostError as ended:  # up to 1.9, exit status 1 after printing the version
            words = ended.detail
        found = re.search(r"version (\d+)\.(\d+)", words)
        return tuple(map(int, found.groups())) if found else None

    def _in_words(self, target: BannedCpus, read: Callable[[str], Cpus | None]) -> str | None:
        """The CPUs that the file bans as a CPU list, parsed with ``read``; None if invalid or absent."""
        try:
            found = read(self._text(target) or "")
        except ValueError:
            return None
        return None if found is None else format_list(found)

    def _text(self, target: BannedCpus) -> str | None:
        with refusals(target.path):
            return self._root.whole(target.path)

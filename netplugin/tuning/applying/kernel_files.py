"""Read and write files of /proc and /sys, including sysctls."""

from __future__ import annotations

import errno

from netplugin.errors import HostError
from netplugin.host.cpus import format_list, parse_list
from netplugin.tuning.applying.place import Kept, Raw
from netplugin.tuning.applying.refusals import refusal
from netplugin.tuning.applying.writable import WritableRoot
from netplugin.tuning.masks import from_kernel, to_kernel
from netplugin.tuning.read.kernel import sysctl_path
from netplugin.tuning.read.memory import chosen
from netplugin.tuning.root import Unknown
from netplugin.tuning.steps import File, Sysctl

#: Errors of ``write_irq_affinity`` in kernel/irq/proc.c for a kernel-managed interrupt: EIO before
#: Linux 6.4, EPERM since. Missing permission is EACCES or EROFS instead.
_MANAGED = (errno.EIO, errno.EPERM)


class KernelFiles:
    """Raw value: the file's text, or of a choice like ``always [madvise] never`` the word in brackets."""

    def __init__(self, root: WritableRoot) -> None:
        self._root = root

    def read(self, target: File | Sysctl) -> Raw:
        path = _path(target)
        text = self._root.text(path)
        if isinstance(text, Unknown):
            if text.missing and _passing(target):
                raise Kept("it is not there any more")
            raise HostError(f"{path}: {text.reason}", step="read")
        return chosen(text) if "[" in text else text

    def value(self, target: File | Sysctl, raw: Raw) -> str | None:
        path = _path(target)
        try:
            if path.endswith("_list"):
                return format_list(parse_list(raw or ""))
            if path.endswith(("cpumask", "affinity")):
                return to_kernel(from_kernel(raw or "0"))
        except ValueError:
            pass  # not parsable: compare it as text
        return raw

    def write(self, target: File | Sysctl, wanted: str | None) -> None:
        self.restore(target, wanted)
        path = _path(target)
        if path.endswith("/nr_hugepages") and (got := self.read(target)) != wanted:
            raise HostError(
                f"the kernel has {got} pages to give and not {wanted}: memory is in use or in pieces",
                step="read-back", fix="reserve them at boot, with the plan's kernel arguments",
            )  # fmt: skip

    def restore(self, target: File | Sysctl, raw: Raw) -> None:
        path = _path(target)
        try:
            self._root.write(path, raw or "")
        except OSError as refused:
            if _passing(target) and refused.errno == errno.ENOENT:
                raise Kept("it is not there any more") from refused
            if _passing(target) and refused.errno in _MANAGED:
                raise Kept("the kernel itself places this interrupt") from refused
            raise refusal(path, refused) from refused


def _path(target: File | Sysctl) -> str:
    return target.path if isinstance(target, File) else sysctl_path(target.name)


def _passing(target: File | Sysctl) -> bool:
    """True for an interrupt's file, which comes and goes with its device."""
    return isinstance(target, File) and not target.lasting

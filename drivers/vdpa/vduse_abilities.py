"""What the kernel and the libvirt of this host have for mode ``vduse``: asked once, known to any thread."""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path

from drivers.vdpa.vduse_devices import VduseTree
from netplugin.api.errors import NetpluginError, TryAgain
from netplugin.host.ovs_versions import Version, parse_version
from netplugin.host.processes import run
from netplugin.host.usability import Usability

LOG = logging.getLogger(__name__)
#: The first libvirt that has ``<interface type='vdpa'>`` (formatdomain, "vDPA devices").
_LIBVIRT = (6, 9)
_DAEMONS = ("virtqemud", "libvirtd")
_WAIT_S = 3.0


def installed_libvirt(deadline: float) -> Version | None:
    """The version of the libvirt that is installed, by its daemon, which need not run; None if none says it.

    Raises: HostError, OperationTimeout.
    """
    daemon = next(filter(shutil.which, _DAEMONS), None)
    if daemon is None:
        return None
    until = min(deadline, time.monotonic() + _WAIT_S)
    said = run([daemon, "--version"], step="libvirt", deadline=until)
    found = re.search(r"libvirt\) (\S+)", said)  # libvirtd (libvirt) 9.0.0
    return parse_version(found[1]) if found else None


@dataclass(frozen=True)
class _Answers:
    """What was reported while this kernel module was loaded. ``failure``: why the kernel did not answer."""

    module: tuple[int, int]
    pairs: int = 1
    failure: str | None = None
    libvirt: Version | None = None


class VduseAbilities(VduseTree, ABC):
    """``learn`` is called by one thread; any may call the rest, which waits for nothing."""

    _answers: _Answers | None = None

    @abstractmethod
    def _ask_kernel(self, deadline: float) -> int:
        """Return the most queue pairs of a device. Raises: HostError, TryAgain."""

    def _ask_libvirt(self, deadline: float) -> Version | None:
        return installed_libvirt(deadline)

    def learn(self, deadline: float) -> None:
        """Ask the kernel and libvirt what is not known since the kernel module was loaded."""
        module = _identity(self.control)
        if module is None or self._known:
            return
        try:
            known = _Answers(module, pairs=self._ask_kernel(deadline))
        except TryAgain:
            return  # with the next look
        except NetpluginError as error:
            LOG.warning("the kernel does not say what VDUSE devices it makes: %s", error.detail)
            known = _Answers(module, failure=error.detail)
        try:
            known = replace(known, libvirt=self._ask_libvirt(deadline))
        except NetpluginError as error:
            LOG.warning("the version of libvirt is not known: %s", error.detail)
        self._answers = known

    @property
    def pairs(self) -> int:
        """The most queue pairs of a VDUSE device that the kernel makes for a network; 0: it makes none.

        1 as long as that is not known.
        """
        known = self._known
        return known.pairs if known else 1

    def usability(self) -> Usability:
        """Whether the host has what new ports need, as far as it is known."""
        if not (loaded := self.loaded()).usable:
            return loaded
        if self.pairs:
            return Usability(True)
        return Usability(
            False,
            "the kernel module vduse makes no network devices",
            "boot Linux 6.10 or newer (Debian: 6.12); or, for new ports, set [vdpa] mode = relay",
            "vduse",
        )

    def usability_for_auto(self) -> Usability:
        """The same for ``auto``, where nobody has chosen this mode: what is not sure, is missing."""
        usable, known = self.usability(), self._known
        if not usable.usable:
            return usable
        if known and known.failure:
            fix = "restart the agent, after the modules are loaded; or set [vdpa] mode"
            return Usability(False, f"the kernel does not say what it has: {known.failure}", fix, "vduse")
        if known and known.libvirt and known.libvirt < _LIBVIRT:
            reason = f"libvirt {'.'.join(map(str, known.libvirt))} has no <interface type='vdpa'>"
            return Usability(False, reason, "install libvirt 6.9 or newer", "libvirt-version")
        return usable

    @property
    def _known(self) -> _Answers | None:
        """The answers, if they are of the module that is loaded now."""
        known = self._answers
        return known if known and known.module == _identity(self.control) else None


def _identity(file: Path) -> tuple[int, int] | None:
    """What tells the file from one of before: that of a kernel module is new when the module is loaded."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_ino, found.st_ctime_ns

"""Run programs on this host or in the VM by SSH, each with a deadline; they end with this process."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from netplugin.api.errors import BackendUnavailable, HostError, OperationTimeout
from netplugin.host.processes import needs_program, printable, run
from netplugin.libvirt.transient import TransientDomain
from netplugin.libvirt.vm_image import BUILD, Manifest
from netplugin.programs.program import ProgramError
from netplugin.programs.ssh import SshTarget

STEP = "verify-guest"
#: Debian's package of each program.
_PACKAGES = {
    **{"cyclictest": "rt-tests", "dpdk-testpmd": "dpdk-dev", "iperf3": "iperf3", "ethtool": "ethtool"},
    **{"virsh": "libvirt-clients", "qemu-img": "qemu-utils", "ssh": "openssh-client"},
}
#: Bytes that a program in the VM may print: many times what a histogram of 10 minutes has.
_LIMIT = 16 << 20
_SHORT_S = 60.0
#: Characters of an error text from the VM.
_WORDS = 600
#: The kernel ends the program with this process, even if that is killed.
_WITH_US = ("setpriv", "--pdeathsig", "KILL", "--")


class HostShell:
    where = "on this host"

    def run(self, words: Sequence[str], seconds: float = _SHORT_S) -> str:
        """Return what the program prints. Raises: BackendUnavailable, HostError, OperationTimeout."""
        return run([*_WITH_US, *words], step=words[0], deadline=time.monotonic() + seconds)


class GuestShell:
    """``console`` returns the last lines of the VM's console."""

    where = "in the VM"

    def __init__(self, target: SshTarget, domain: TransientDomain, console: Callable[[], str]) -> None:
        self._target, self._domain = target, domain
        self.console = console

    def run(self, words: Sequence[str], seconds: float = _SHORT_S, stdin: str = "") -> str:
        """Return what the program prints; ``stdin`` is what it reads.

        Raises: HostError if it fails, prints too much or the VM ends, OperationTimeout.
        """
        # The kernel ends ssh at the limit of the file.
        command = [*_WITH_US, "prlimit", f"--fsize={_LIMIT}", "--", *self._target.command(words)]
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            try:
                done = subprocess.run(
                    command, input=stdin.encode(), stdout=output, stderr=errors, timeout=seconds, check=False
                )
            except subprocess.TimeoutExpired as late:
                self.check(f"{words[0]} ran in it")
                what = f"{words[0]} did not end in the VM within {seconds:.0f} s"
                raise OperationTimeout(what, step=STEP) from late
            for file in (output, errors):
                file.seek(0)
            printed, why = (each.read(_LIMIT).decode(errors="replace") for each in (output, errors))
        if done.returncode:
            self.check(f"{words[0]} ran in it")
            if len(printed) >= _LIMIT:
                raise HostError(f"{words[0]} in the VM prints more than {_LIMIT >> 20} MB", step=STEP)
            why = why.strip() or printed.strip() or f"exit status {done.returncode}"
            raise HostError(f"{words[0]} in the VM: {printable(why[-_WORDS:])}", step=STEP)
        return printed

    def require(self, program: str) -> None:
        """Raises: BackendUnavailable if the VM has no such program."""
        try:
            self.run(["which", program])
        except HostError as error:
            self.check(f"{program} was looked for")
            raise _lacks(program) from error

    def check(self, when: str) -> None:
        """Raises: HostError with the VM's console if the VM has ended."""
        if not self._domain.is_running:
            fix = "look at its console above and at /var/log/libvirt/qemu on this host"
            raise HostError(f"the VM ended while {when}{self.console()}", step=STEP, fix=fix)


Shell = HostShell | GuestShell


@contextmanager
def as_host_errors(step: str, fix: str) -> Iterator[None]:
    """Raise HostError with this fix in place of ProgramError."""
    try:
        yield
    except ProgramError as wrong:
        raise HostError(str(wrong), step=step, fix=fix) from wrong


def require(programs: Iterable[str], image: Manifest | None = None) -> None:
    """Raises: BackendUnavailable for a program that this host does not have, or an image."""
    for program in programs:
        if image is None:
            needs_program(program, _PACKAGES[program], "verify")
        elif image.packages and _PACKAGES[program] not in image.packages:  # it may have no list of them
            raise _lacks(program)


def _lacks(program: str) -> BackendUnavailable:
    fix = f"{BUILD} --package {_PACKAGES[program]}, in addition to the options of that image"
    return BackendUnavailable(f"the VM has no {program}", step=STEP, fix=fix)

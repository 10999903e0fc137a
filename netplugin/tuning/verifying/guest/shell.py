"""Run programs in the VM by SSH, each with a deadline and a limit of its output."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Sequence
from typing import IO

from netplugin.api.errors import BackendUnavailable, HostError, OperationTimeout
from netplugin.host.processes import printable
from netplugin.libvirt.transient import TransientDomain
from netplugin.libvirt.vm_image import BUILD
from netplugin.programs.ssh import SshTarget
from netplugin.tuning.verifying.guest.machine import STEP

#: Bytes that a program in the VM may print: many times what a histogram of 10 minutes has.
_LIMIT = 16 << 20
_SHORT_S = 60.0
#: Characters of an error text from the VM.
_WORDS = 600


class GuestShell:
    """``console`` returns the last lines of the VM's console."""

    def __init__(self, target: SshTarget, domain: TransientDomain, console: Callable[[], str]) -> None:
        self._target, self._domain = target, domain
        self.console = console

    def run(self, words: Sequence[str], seconds: float = _SHORT_S, stdin: str = "") -> str:
        """Return what the program prints; ``stdin`` is what it reads.

        Raises: HostError if it fails, prints too much or the VM ends, OperationTimeout.
        """
        # ssh ends with this process, even by SIGKILL; the kernel ends it at the limit of the file.
        here = ["setpriv", "--pdeathsig", "KILL", "--", "prlimit", f"--fsize={_LIMIT}", "--"]
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            try:
                status = subprocess.run(
                    [*here, *self._target.command(words)],
                    input=stdin.encode(),
                    stdout=output,
                    stderr=errors,
                    timeout=seconds,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired as late:
                self.check(f"{words[0]} ran in it")
                raise OperationTimeout(
                    f"{words[0]} did not end in the VM within {seconds:.0f} s", step=STEP
                ) from late
            printed, why = _content(output), _content(errors)
        if status:
            self.check(f"{words[0]} ran in it")
            if len(printed) >= _LIMIT:
                raise HostError(f"{words[0]} in the VM prints more than {_LIMIT >> 20} MB", step=STEP)
            why = printable((why.strip() or printed.strip() or f"exit status {status}")[-_WORDS:])
            raise HostError(f"{words[0]} in the VM: {why}", step=STEP)
        return printed

    def needs(self, program: str, package: str) -> None:
        """Raises: BackendUnavailable if the VM has no such program."""
        try:
            self.run(["which", program])
        except HostError as error:
            self.check(f"{program} was looked for")
            raise lacks(program, package) from error

    def check(self, when: str) -> None:
        """Raises: HostError with the VM's console if the VM has ended."""
        if not self._domain.is_running:
            raise HostError(
                f"the VM ended while {when}{self.console()}",
                step=STEP,
                fix="look at its console above and at /var/log/libvirt/qemu on this host",
            )


def lacks(program: str, package: str) -> BackendUnavailable:
    """Return the error for a program that the image does not have."""
    return BackendUnavailable(
        f"the VM has no {program}",
        step=STEP,
        fix=f"{BUILD} --package {package}, in addition to the options of that image",
    )


def _content(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(_LIMIT).decode("utf-8", errors="replace")

"""Run a program with a deadline; if it is missing or fails, raise an error with its error text."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Sequence

from netplugin.api.errors import BackendUnavailable, HostError, OperationTimeout


def remaining(deadline: float) -> float:
    """Seconds left until ``deadline`` (``time.monotonic``), never negative."""
    return max(0.0, deadline - time.monotonic())


def run(args: Sequence[str], *, step: str, deadline: float, stdin: str | None = None) -> str:
    """Run the program and return its stdout, as UTF-8 with U+FFFD for other bytes.

    Raises: BackendUnavailable if it is not installed, HostError with its stderr if it fails or with the error
    of the kernel if it cannot be started, OperationTimeout at the deadline (the program is killed).
    """
    try:
        done = subprocess.run(
            list(args),
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            encoding="utf-8",
            errors="replace",  # file and device names may be any bytes
            timeout=max(0.05, remaining(deadline)),
            check=False,
        )
    except FileNotFoundError as missing:
        fix = f"install the package that has {args[0]}"
        raise BackendUnavailable(f"{args[0]} is not installed", step=step, fix=fix) from missing
    except PermissionError as refused:
        raise HostError(f"{args[0]} may not be run", step=step, fix="run this as root") from refused
    except OSError as failed:  # EAGAIN, ENOMEM, EMFILE, ENOEXEC
        limits = "look at the free memory and at the limits of processes and open files"
        fix = f"{limits}; or install {args[0]} for this machine again"
        what = f"{args[0]} could not be started: {failed.strerror or failed}"
        raise HostError(what, step=step, fix=fix) from failed
    except subprocess.TimeoutExpired as late:
        raise OperationTimeout(f"{args[0]} did not end within {late.timeout:.1f} s", step=step) from late
    if done.returncode != 0:
        words = done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}"
        raise HostError(f"{args[0]}: {words}", step=step)
    return done.stdout


def printable(text: str) -> str:
    """Replace what could control the terminal of the reader, for text that is not this host's."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def needs_program(name: str, package: str, step: str) -> None:
    """Check that a program is installed; ``package`` is its Debian package. Raises: BackendUnavailable."""
    if shutil.which(name) is None:
        raise BackendUnavailable(f"{name} is not installed", step=step, fix=f"apt-get install {package}")

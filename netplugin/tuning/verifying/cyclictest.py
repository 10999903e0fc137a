"""Measure the wake-up latency of CPUs with cyclictest: one timer thread per CPU."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from pydantic import ValidationError

from netplugin.api.errors import HostError, reason
from netplugin.host.cpus import format_list, parse_list
from netplugin.host.processes import needs_program, printable, run
from netplugin.programs import bounded
from netplugin.tuning.verifying.guest.shell import GuestShell
from netplugin.tuning.verifying.result import Histogram, LatencyRound, LatencySettings

STEP = "cyclictest"
#: Time limit in seconds for start and end, in addition to the measurement.
_MARGIN_S = 30.0
#: The same in a VM, which is slow without KVM, and the file with the output there.
_VM_MARGIN_S = 180.0
_FILE = Path("/run/netplugin-cyclictest.json")
#: Capability bits (linux/capability.h) to lock memory and to set a real-time priority.
_CAPABILITIES = {14: "CAP_IPC_LOCK", 23: "CAP_SYS_NICE"}


def require() -> None:
    """Raises: BackendUnavailable if cyclictest is missing, HostError if it may not run in real time."""
    needs_program("cyclictest", "rt-tests", STEP)
    lines = Path("/proc/self/status").read_text().splitlines()
    [held] = [int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")]
    missing = [name for bit, name in _CAPABILITIES.items() if not held >> bit & 1]
    if missing:
        raise HostError(
            f"cyclictest needs {' and '.join(missing)}: it runs in real time and locks its memory",
            step=STEP,
            fix="run it as root",
        )


def measure(settings: LatencySettings) -> tuple[str, LatencyRound]:
    """Run cyclictest once; return its version and the histograms.

    Raises: BackendUnavailable, HostError, OperationTimeout (it is killed).
    """
    deadline = time.monotonic() + settings.round_s + _MARGIN_S
    with TemporaryDirectory(prefix="netplugin-verify-") as folder:
        file = Path(folder) / "cyclictest.json"
        # cyclictest is killed with this process, even by SIGKILL.
        die = ["setpriv", "--pdeathsig", "KILL", "--"]
        run([*die, *arguments(settings, file, os.sched_getaffinity(0))], step=STEP, deadline=deadline)
        try:
            text = file.read_text()
        except (OSError, UnicodeDecodeError) as wrong:
            raise HostError(f"what cyclictest wrote cannot be read: {reason(wrong)}", step=STEP) from wrong
        return parsed(text, settings, "this machine")


def measure_in(shell: GuestShell, vcpus: int, settings: LatencySettings) -> tuple[str, LatencyRound]:
    """Run cyclictest once in a VM with so many vCPUs. Raises: NetpluginError."""
    shell.run(arguments(settings, _FILE, set(range(vcpus))), settings.round_s + _VM_MARGIN_S)
    return parsed(shell.run(["cat", str(_FILE)]), settings, "the VM")


def arguments(settings: LatencySettings, file: Path, own: set[int]) -> list[str]:
    """Arguments as in the real-time KVM guides; clock_nanosleep is cyclictest's default.

    ``own`` are the CPUs that this process may use; cyclictest's main thread runs on those not measured.
    """
    cpus = parse_list(settings.cpus)
    others = own - set(cpus)
    return [
        *("cyclictest", "--quiet", "--mlockall", f"--priority={settings.priority}"),
        *(f"--interval={settings.interval_us}", f"--duration={settings.round_s}"),
        *(f"--histogram={settings.width_us}", f"--affinity={settings.cpus}", f"--threads={len(cpus)}"),
        *([f"--mainaffinity={format_list(others)}"] if others else []),
        f"--json={file}",
    ]


def parsed(text: str, settings: LatencySettings, where: str) -> tuple[str, LatencyRound]:
    """Parse the output of cyclictest on ``where``. Raises: HostError."""
    try:
        version, found = parse(text)
    except ValueError as wrong:
        raise HostError(
            f"what cyclictest wrote on {where} cannot be made sense of: {printable(str(wrong))[:300]}",
            step=STEP,
            fix="install rt-tests 2.4 or later there",
        ) from wrong
    if set(found.cpus) != set(parse_list(settings.cpus)):
        raise HostError(
            f"cyclictest measured CPUs {sorted(found.cpus)}, not {settings.cpus}",
            step=STEP,
            fix="take a CPU that the control group gives",
        )
    return version, found


def parse(text: str) -> tuple[str, LatencyRound]:
    """Parse the output of ``--json`` (``write_stats`` in cyclictest.c). Raises: ValueError."""
    try:
        whole = bounded.parse(text)
        # The field name ends with a colon, at least in 2.4.
        version = str(whole.get("rt_test_version:", whole.get("rt_test_version", "unknown")))
        cpus = {int(each["cpu"]): _histogram(each) for each in whole["thread"].values()}
    except (KeyError, TypeError, AttributeError, ValidationError) as wrong:
        raise ValueError("it has not the fields of cyclictest --json") from wrong
    if not cpus or not all(histogram.samples for histogram in cpus.values()):
        raise ValueError("a CPU has no samples")
    return version, LatencyRound(cpus=dict(sorted(cpus.items())))


def _histogram(thread: Mapping[str, object]) -> Histogram:
    """Build a histogram; overflows are the samples in ``cycles`` that the histogram lacks."""
    counts = thread["histogram"]
    if not isinstance(counts, dict):
        raise TypeError("the histogram is no object")
    within = sum(counts.values())
    if min(counts.values(), default=0) < 0:
        raise ValueError("a histogram has fewer than no samples")
    return Histogram.model_validate(
        {
            "counts": counts,
            "overflows": max(0, int(str(thread["cycles"])) - within),
            "min_us": thread["min"],
            "average_us": thread["avg"],
            "max_us": thread["max"],
        }
    )

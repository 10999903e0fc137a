"""Measure the wake-up latency of CPUs with cyclictest: one timer thread per CPU."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import ValidationError

from netplugin.api.errors import HostError
from netplugin.host.cpus import format_list, parse_list
from netplugin.host.processes import printable
from netplugin.programs import bounded
from netplugin.tuning.facts import Cpus
from netplugin.tuning.verifying.result import Histogram, LatencyRound, LatencySettings
from netplugin.tuning.verifying.shell import HostShell, Shell

STEP = "cyclictest"
#: Time limit in seconds for start and end, in addition to the measurement.
_MARGIN_S = 30.0
#: The same in a VM, which is slow without KVM; and the folder with the output there.
_VM_MARGIN_S, _RUN = 180.0, Path("/run")


def measure(settings: LatencySettings) -> tuple[str, LatencyRound]:
    """Run cyclictest once on this host; see ``measure_by``."""
    with TemporaryDirectory(prefix="netplugin-verify-") as folder:
        own = frozenset(os.sched_getaffinity(0))
        return measure_by(HostShell(), own, settings, Path(folder), _MARGIN_S)


def measure_by(
    shell: Shell, own: Cpus, settings: LatencySettings, folder: Path = _RUN, margin_s: float = _VM_MARGIN_S
) -> tuple[str, LatencyRound]:
    """Run cyclictest once where there are the CPUs ``own``; return its version and the histograms.

    Raises: BackendUnavailable, HostError, OperationTimeout (it is killed).
    """
    file = folder / "netplugin-cyclictest.json"
    shell.run(arguments(settings, file, own), settings.round_s + margin_s)
    try:
        version, found = parse(shell.run(["cat", str(file)]))
    except ValueError as wrong:
        why = f"what cyclictest wrote {shell.where} cannot be made sense of: {printable(str(wrong))[:300]}"
        raise HostError(why, step=STEP, fix="install rt-tests 2.4 or later there") from wrong
    if set(found.cpus) != set(parse_list(settings.cpus)):
        what = f"cyclictest measured CPUs {sorted(found.cpus)}, not {settings.cpus}"
        raise HostError(what, step=STEP, fix="take a CPU that the control group gives")
    return version, found


def arguments(settings: LatencySettings, file: Path, own: Cpus) -> list[str]:
    """Arguments as in the real-time KVM guides; clock_nanosleep is cyclictest's default.

    Its main thread runs on those CPUs of ``own`` that are not measured.
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


def _histogram(thread: Mapping[str, Any]) -> Histogram:
    """Build a histogram; overflows are the samples in ``cycles`` that the histogram lacks."""
    counts = thread["histogram"].values()
    if min(counts, default=0) < 0:
        raise ValueError("a histogram has fewer than no samples")
    return Histogram(
        counts=thread["histogram"],
        overflows=max(0, int(thread["cycles"]) - sum(counts)),
        min_us=thread["min"],
        average_us=thread["avg"],
        max_us=thread["max"],
    )

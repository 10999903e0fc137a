"""`make demo`: NICs plugged through the agent into real guests, on a hypervisor made for it.

This part runs on the machine: it fetches the guests' kernel, starts the rest
(`tests.demo_inside`) in a sandbox, and looks afterwards whether anything was left behind.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.demo_steps import Steps, took
from tests.demo_traces import Sandboxed, Traces, left_behind
from tests.lab import kernel, sandbox
from tests.lab.hypervisor import BRIDGE_BACKEND, OVS_BACKEND
from tests.lab.processes import LabError

BACKENDS = (OVS_BACKEND, BRIDGE_BACKEND)
HUGEPAGES = 140
INTERRUPTED = 128 + signal.SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    if os.geteuid() != 0:
        print("demo: this needs root: it makes namespaces and borrows hugepages", file=sys.stderr)
        return 2
    try:
        return _demo(options.backend or BACKENDS)
    except LabError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        return INTERRUPTED


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.demo", description=__doc__)
    parser.add_argument("--backend", action="append", choices=BACKENDS, help="only this one; may be repeated")
    return parser.parse_args(argv)


def _demo(backends: Sequence[str]) -> int:
    steps = Steps()
    print("netplugin demo: real switches, real guests, all of it private to this run\n")
    with steps.step("The kernel that the guests boot"):
        steps.say(f"Debian's {kernel.fetch().version}, unpacked in {kernel.CACHE.name}/")
    with tempfile.TemporaryDirectory(prefix="netplugin-demo-") as directory:
        before = Traces.now()
        with Sandboxed(Path(directory)) as sandboxed:
            status = _inside(steps, Path(directory), backends)
            found = left_behind(before, Path(directory), sandboxed)
    _summary(steps, found)
    return status or (1 if found else 0)


def _inside(steps: Steps, directory: Path, backends: Sequence[str]) -> int:
    """Run the rest in a sandbox; a signal is passed on to it and waited for."""
    steps.announce(f"A sandbox: {HUGEPAGES} hugepages; processes, mounts and network of its own")
    steps.save(directory)
    # What the sandbox's programs put into the temporary directory is looked at afterwards.
    os.environ["TMPDIR"] = str(directory)
    inner = [sys.executable, "-m", "tests.demo_inside", str(directory), *backends]
    status = sandbox.main(["--hugepages", str(HUGEPAGES), "--", *inner])
    steps.load(directory)
    return status


def _summary(steps: Steps, found: Sequence[str]) -> None:
    print("\nTime by step")
    for title, seconds in steps.taken:
        print(f"  {title:<58} {took(seconds):>8}")
    print(f"  {'in all':<58} {took(steps.elapsed()):>8}")
    print("\nLeft behind")
    if not found:
        print(
            "  nothing: looked for processes, network links, mounts, hugepages and\n"
            "  files under /run, /dev, /etc/libvirt, /var and the temporary directory"
        )
    for trace in found:
        print(f"  {trace}")


if __name__ == "__main__":
    sys.exit(main())

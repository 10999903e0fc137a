"""``python -m tests.functional.verify_in_vm IMAGE``, in a sandbox with hugepages: ``host verify --guest``
with a real libvirt: a run, one that is killed, and one that is placed. Prints as JSON what was seen."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.lab.libvirtd import PrivateLibvirt
from tests.lab.processes import wait_for

NAME = "netplugin-verify"
VERIFY = (sys.executable, "-m", "netplugin.cli.main", "host", "verify")
#: CPU 1 is for VMs, and CPU 0 for all else.
PLAN = ("--pmd-cores", "0", "--vm-cores", "1", "--emulator-cores", "0", "--hugepage-kb", "2048")
SHORT = ("--emulate", "--rounds", "2", "--duration", "4", "--interval-us", "10000", "--boot", "600")
RUN_S, START_S = 1200.0, 120.0


def words(image: Path, results: Path, *more: str) -> list[str]:
    return [*VERIFY, "--guest", str(image), "--results", str(results), "-f", "json", *SHORT, *more]


def verify(image: Path, results: Path, *more: str) -> dict[str, Any]:
    done = subprocess.run(
        words(image, results, *more), capture_output=True, text=True, timeout=RUN_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout), "said": done.stderr}


def looked_at(image: Path) -> dict[str, Any]:
    with PrivateLibvirt() as libvirt, tempfile.TemporaryDirectory() as kept:
        results = Path(kept)

        def running() -> bool:
            return NAME in {domain.name() for domain in libvirt.connect().listAllDomains()}

        first = verify(image, results, "--label", "before")
        left = [running(), *(file.name for file in (image / "overlays").iterdir())]

        killed = subprocess.Popen(words(image, results), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for(running, START_S, "the VM runs")
        killed.kill()
        killed.wait()
        wait_for(lambda: not running(), START_S, "libvirt ends the VM of a run that was killed")

        placed = verify(image, results, "--label", "after", *PLAN)
        # Between VMs without KVM: rounds are short.
        tcp = verify(
            image, results, "--label", "tcp", "--tcp", "--testpmd", "--window", "1", "--duration", "2"
        )
        xml = libvirt.qemu_log(NAME).read_text()
        compared = subprocess.run(
            [*VERIFY, "compare", "before", "after", "--results", str(results)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        ).stdout
        left += [running(), *(file.name for file in (image / "overlays").iterdir())]
        left.append(Path("/sys/class/net/npverify").exists())
    return {
        "first": first,
        "tcp": tcp,
        "placed": placed,
        "left": left,
        "compared": compared,
        "huge": "hugepages" in xml,
    }


if __name__ == "__main__":
    print(json.dumps(looked_at(Path(sys.argv[1]))))

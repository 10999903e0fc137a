"""What becomes of a VM when a part of a hypervisor is killed before, in and after its live migration.

    python -m tests.lab.sandbox --guests --hugepages 200 -- python -m tests.bench.migration_kills [BACKEND...]

A row is a kill, on the side that it names; the cells say where the VM runs afterwards, which answers there,
with nothing of it left on the other side.
"""

from __future__ import annotations

import faulthandler
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.bench.live_migration import BACKENDS, booted, row
from tests.lab.hypervisor import Hypervisor
from tests.lab.mishaps import Mishap, befall, mishaps
from tests.lab.traveller import Traveller, Way
from tests.lab.two_hosts import two_hosts

WAYS = (Way.MANUAL, Way.AUTO)
HEAD = ("backend", "killed", *(way.value for way in WAYS))
#: The longest a case may take, in seconds; then all is given up.
CASE_S = 600.0
FAILED = "**failed**"


def outcome(traveller: Traveller, way: Way, mishap: Mishap) -> str:
    """Where the VM runs afterwards."""
    source = traveller.home
    faulthandler.dump_traceback_later(CASE_S, exit=True)
    try:
        with tempfile.TemporaryDirectory(dir="/run") as directory:
            return _side(befall(traveller, way, mishap, Path(directory)), source)
    except Exception:  # counted, and the exit status says so: the other kills are still tried
        traceback.print_exc()
        traveller.renew()
        return FAILED
    finally:
        faulthandler.cancel_dump_traceback_later()


def _side(host: Hypervisor | None, source: Hypervisor) -> str:
    if host is None:
        return "ended"
    return "source" if host is source else "destination"


def main(backends: Sequence[str]) -> int:
    print(row(HEAD))
    print(row(["---"] * len(HEAD)), flush=True)
    counts: Counter[str] = Counter()
    with two_hosts(backends) as hosts:
        travellers = booted(hosts, backends)
        for backend, mishap in mishaps(backends):
            cells = [outcome(travellers[backend], way, mishap) for way in WAYS]
            counts.update(cells)
            print(row([backend, str(mishap), *cells]), flush=True)
    print(f"\n{counts.total()} kills, {counts[FAILED]} failed: {dict(counts)}")
    return 1 if counts[FAILED] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or BACKENDS))

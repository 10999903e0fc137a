"""What was freed between what is kept goes back to the kernel, in a process that has memory as installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.docs.unit_file import environment

_FREES = """
import asyncio, json, re
from agents.main import release_memory

def resident_kib():
    return int(re.search(r"^VmRSS:\\s+(\\d+) kB", open("/proc/self/status").read(), re.MULTILINE)[1])

many = [[number] for number in range(400_000)]
kept = many[::1000]
full = resident_kib()
del many
freed = resident_kib()
asyncio.run(release_memory())
print(json.dumps([full, freed, resident_kib()]), len(kept))
"""


def test_what_was_freed_goes_back_to_the_kernel() -> None:
    run = subprocess.run(
        [sys.executable, "-c", _FREES],
        env=os.environ | environment(),
        capture_output=True,
        check=True,
        timeout=60,
    )
    full, freed, given_back = json.loads(run.stdout.rpartition(b"]")[0] + b"]")
    assert full - freed < 10_000, "by itself malloc keeps it"
    assert full - given_back > 20_000

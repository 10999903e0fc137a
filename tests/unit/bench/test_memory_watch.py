"""What a process has in use: it counts what is kept, of all sizes, and not what was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.lab.memory_watch import InUse

_KEEPS = """
import json
from tests.lab.memory_watch import InUse
found = [InUse.now()]
large = [bytes(4000) for _ in range(2000)]
found.append(InUse.now())
small = [float(number) for number in range(100_000)]
found.append(InUse.now())
del large, small
found.append(InUse.now())
print(json.dumps([one.malloc_mb for one in found]))
"""


def test_what_is_kept_counts_until_it_is_gone() -> None:
    run = subprocess.run(
        [sys.executable, "-c", _KEEPS],
        env=os.environ | {"PYTHONMALLOC": "malloc"},
        capture_output=True,
        check=True,
        timeout=60,
    )
    before, with_large, with_small, after = json.loads(run.stdout)
    assert with_large - before > 7
    assert with_small - with_large > 2.4
    assert after - before < 1


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "memory.json"
    path.write_text('{"malloc_mb": 12.5}')
    assert InUse.read(path) == InUse(12.5)

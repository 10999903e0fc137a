"""What a process has in use: it counts what is kept, of either allocator, and not what was."""

from __future__ import annotations

import gc
from pathlib import Path

from tests.lab.memory_watch import InUse


def test_what_is_kept_counts_until_it_is_gone() -> None:
    gc.collect()  # what other tests have left does not go meanwhile
    before = InUse.now()
    large = [bytes(4000) for _ in range(2000)]
    with_large = InUse.now()
    assert with_large.malloc_mb - before.malloc_mb > 7
    small = [float(number) for number in range(50_000)]
    with_small = InUse.now()
    assert with_small.blocks - with_large.blocks > 40_000
    del large, small
    after = InUse.now()
    assert after.malloc_mb - before.malloc_mb < 1 and after.blocks - before.blocks < 10_000


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "memory.json"
    path.write_text('{"malloc_mb": 12.5, "blocks": 300000}')
    assert InUse.read(path) == InUse(12.5, 300_000)

"""The cache of what the lab fetches: who makes one part of it waits for no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab import kernel


@pytest.mark.timeout(60)
def test_a_part_that_is_made_blocks_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "CACHE", tmp_path)
    with kernel.locked("nested"), kernel.scratch("nested") as slow:
        with kernel.locked("kernel"), kernel.scratch("kernel") as quick:
            assert slow.is_dir() and quick.is_dir()
    assert {path.suffix for path in tmp_path.iterdir()} == {".lock", ""}, "and .gitignore"


def test_what_a_killed_one_left_of_a_part_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "CACHE", tmp_path)
    for left in ("fetch-kernel-abc", "fetch-nested-abc"):
        (tmp_path / left).mkdir()
    with kernel.scratch("kernel"):
        assert [path.name for path in tmp_path.glob("*-abc")] == ["fetch-nested-abc"]

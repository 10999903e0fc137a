"""That KVM boots no guest is found out once for all processes of a run, and again an hour later."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.lab import accelerator


@pytest.mark.parametrize(("age_s", "asked"), [(0, False), (3000, False), (4000, True), (-100, True)])
def test_that_it_boots_nothing_is_known_for_an_hour(
    age_s: float, asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = tmp_path / "failed"
    failed.touch()
    written = time.time() - age_s
    os.utime(failed, (written, written))
    monkeypatch.setattr(accelerator, "_kvm_boots", lambda directory: True)
    assert accelerator._boots(failed) == asked


def test_it_is_kept_only_if_it_boots_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = tmp_path / "failed"
    monkeypatch.setattr(accelerator, "_kvm_boots", lambda directory: True)
    assert accelerator._boots(failed) and not failed.exists()
    monkeypatch.setattr(accelerator, "_kvm_boots", lambda directory: False)
    assert not accelerator._boots(failed) and failed.exists()

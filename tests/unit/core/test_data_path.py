"""What a backend declares for zeroloss: one data path, or one for each kind of its ports."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from netplugin import data_path as declarations
from netplugin.data_path import DataPath, NoDataPath, data_path, data_paths

TAP = DataPath("tap", "device")
VDPA = DataPath("vhostvdpa", "character", pmd_threads=True)


def _declares(monkeypatch: pytest.MonkeyPatch, declared: Any) -> None:
    monkeypatch.setattr(declarations, "_loaded", lambda backend: SimpleNamespace(data_path=declared))


def test_one_is_that_of_every_port(monkeypatch: pytest.MonkeyPatch) -> None:
    _declares(monkeypatch, TAP)
    assert data_path("toy", "anything") is TAP and data_paths("toy") == (TAP,)


def test_of_several_the_vif_type_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    _declares(monkeypatch, {"tap": TAP, "character": VDPA})
    assert data_path("toy", "tap") is TAP and data_path("toy", "character") is VDPA
    assert data_paths("toy") == (TAP, VDPA)
    with pytest.raises(NoDataPath, match="a toy port with vif_type hostdev has no data_path; character, tap"):
        data_path("toy", "hostdev")


@pytest.mark.parametrize("declared", [None, {}, "tap", {"tap": "device"}])
def test_anything_else_is_none(monkeypatch: pytest.MonkeyPatch, declared: Any) -> None:
    _declares(monkeypatch, declared)
    with pytest.raises(NoDataPath, match="backend toy declares no data_path"):
        data_paths("toy")


def test_whoever_moves_frames_for_a_vhost_port_shares_the_memory_of_the_vm() -> None:
    assert VDPA.shares_memory and DataPath("vhostuser", "socket").shares_memory
    assert not TAP.shares_memory and not DataPath("vfio", "pci_address").shares_memory

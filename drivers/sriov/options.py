"""Options of the sriov backend."""

from __future__ import annotations

from typing import Any

from drivers.vf.options import DEVICES, GROUP


def list_opts() -> list[tuple[str, list[Any]]]:
    return [(GROUP, [DEVICES])]

"""The stand-in for TRex (tests/data/trex-tree) configured with what to play, and the calls it got."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).resolve().parents[2] / "data"
TREE = DATA / "trex-tree"


@dataclass(frozen=True)
class Trex:
    """``play`` before it is started; see the files of the tree."""

    log: Path
    patch: pytest.MonkeyPatch

    def play(self, recording: str, **more: Any) -> None:
        play = {"recording": recording, "log": str(self.log), **more}
        self.patch.setenv("TREX_PLAY", json.dumps(play))
        self.patch.setenv("TREX_RECORDINGS", str(DATA / "trex-3.08"))

    def calls(self, name: str | None = None) -> list[dict[str, Any]]:
        """What it was asked, in order; of this name only."""
        if not self.log.exists():
            return []
        found = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [call for call in found if name is None or call.get("call") == name]

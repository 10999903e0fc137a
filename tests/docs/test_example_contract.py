"""The example has what the agent relies on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.docs.backend_contract import BackendContract
from tests.docs.example_backend import MARK, Files


class TestFiles(BackendContract):
    kind = Files

    @pytest.fixture
    def options(self, tmp_path: Path) -> str:
        directory = tmp_path / "files"
        directory.mkdir()
        return f"[files]\ndirectory = {directory}\n"

    def look(self, conf: Any) -> Mapping[str, str]:
        return {file.name: file.read_text() for file in Path(conf.files.directory).iterdir()}

    def damage(self, conf: Any, port_id: str) -> None:
        (Path(conf.files.directory) / port_id).write_text(f"{MARK}{port_id}\n")

    def occupy(self, conf: Any, port_id: str) -> None:
        (Path(conf.files.directory) / port_id).write_text("not ours\n")

"""Run descriptions in a line, and the command as users call it: for the tests of the matrix."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import yaml
from netplugin_zeroloss.cli.main import main
from netplugin_zeroloss.journal import RunRecord
from netplugin_zeroloss.matrix.cells import CellTask
from netplugin_zeroloss.matrix.description import RunDescription, read

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = ROOT / "tools/trex/zeroloss.py"


def described(**sections: Any) -> dict[str, Any]:
    """The least there can be, and what is given instead."""
    return {
        "name": "run",
        "generator": {"type": "sim"},
        "matrix": {"backends": ["dpdkvhostuser"]},
        **sections,
    }


def description(**sections: Any) -> RunDescription:
    return read(yaml.safe_dump(described(**sections)), "run.yaml")


def with_agent(**sections: Any) -> dict[str, Any]:
    """On an agent, with TRex's place taken by a simulation."""
    return described(
        **{
            "agent": {"url": "http://127.0.0.1:1"},
            "ends": [
                {"network": {"type": "flat", "physical_network": "left"}},
                {"network": {"type": "flat", "physical_network": "right"}},
            ],
            "vnf": {"type": "external"},
            **sections,
        }
    )


def write(folder: Path, sections: Mapping[str, Any], name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_text(yaml.safe_dump(dict(sections)), encoding="utf-8")
    return path


def command(*arguments: str | Path) -> list[str]:
    """Signals end it even where what runs the tests ignores them, as under nohup."""
    program = [sys.executable, str(PROGRAM), "matrix", *map(str, arguments)]
    return ["env", "--default-signal=INT,HUP", *program]


def call(*arguments: str | Path, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """The program, in a process of its own, as a user runs it."""
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=timeout, check=False, cwd=ROOT
    )


def call_here(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The same in this process, which has imported all: for what does not depend on having one's own."""
    words = ["matrix", *map(str, arguments)]
    with redirect_stdout(StringIO()) as output, redirect_stderr(StringIO()) as errors:
        try:
            status = main(words)
        except SystemExit as ended:
            status = int(ended.code or 0)
    return subprocess.CompletedProcess(words, status, output.getvalue(), errors.getvalue())


def findings(run: RunRecord) -> list[tuple[Any, ...]]:
    """What was found in each part, without the times at which it was: equal for equal runs."""
    return [
        (
            CellTask(record.cell, record.part),
            record.error,
            None
            if record.result is None
            else [
                (t["repeat"], t["number"], t["rate_pps"], t["duration_s"], t["verdict"], t["measured"])
                for t in (*record.result["trial_log"], *record.result["follow_up_log"])
            ],
            None
            if record.result is None
            else (
                record.result["verdict"],
                record.result["zero_loss_pps"],
                record.result["bounds_pps"],
                record.result["repeats"]["answers_pps"],
            ),
        )
        for record in run.records
    ]

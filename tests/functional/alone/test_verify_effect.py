"""``netplugin host verify effect`` on the real machine: cyclictest before and after a real apply.

What it sets is undone. No reboot is made: what is kept for it is looked at, and then it goes on without.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.functional.alone.test_host_apply import (
    DEADLINE_S,
    PAGES,
    SMALL_PAGES,
    apply,
    before,
    values,
)

__all__ = ["before"]  # a fixture

SHORT = ("--only", "latency", "--cpus", "0-1", "--rounds", "2", "--duration", "2")


def effect(results: Path, journal: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "netplugin.cli.main", "host", "verify", "effect"]
    return subprocess.run(
        [*command, "--results", str(results), "--journal", str(journal), *options],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def test_the_effect_of_a_real_apply(before: dict[str, str], tmp_path: Path) -> None:
    results, journal = tmp_path / "runs", tmp_path / "journal"
    memory = str((int(before[str(PAGES)]) + 24) * 2)
    plan = ("--pmd-cores", "0", *SMALL_PAGES, "--vm-memory-mb", memory)
    try:
        first = effect(results, journal, "--yes", *SHORT, *plan)
        assert first.returncode == 3, first.stderr
        assert "kernel argument" in first.stdout and "left to do, with a reboot" in first.stdout
        assert f"netplugin host verify effect --results {results}" in first.stdout
        assert {file.name.partition("-")[2] for file in results.glob("2*.json")} == {"run-before.json"}
        assert PAGES.read_text() != before[str(PAGES)], "it is set, as far as a running host can"

        # As after a reboot that was not made: the options are those of the first call.
        second = effect(results, journal, "--go-on", "-f", "json")
        assert second.returncode in (0, 1), second.stderr
        shown = json.loads(second.stdout)
        figures = {figure["name"]: figure for figure in shown["figures"]}
        for name in ("latency average", "latency maximum"):
            assert [len(figures[name][f"samples_{when}"]) for when in ("before", "after")] == [2, 2]
        assert "hugepages of 2048 KB on node 0" in {each["name"] for each in shown["differences"]}
        [page] = results.glob("*-effect.txt")
        assert page.read_text().startswith("Effect of: netplugin host apply --pmd-cores 0 ")
        assert len(list(results.glob("2*.json"))) == 2 and not (results / "effect.state").exists()
    finally:
        apply(journal, "--undo", "--yes")
    assert values() == before

"""How exposed the systemd unit is, as systemd itself counts it (systemd-analyze(1))."""

from __future__ import annotations

import re
import subprocess

from tests.docs.blocks import ROOT
from tests.docs.unit_file import UNIT, settings

#: 10 is all of root's powers, 0 none.
MOST = 3.0


def test_the_unit_is_as_little_exposed_as_the_page_says() -> None:
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", str(UNIT)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    score = re.search(r"Overall exposure level for \S+: (\d+\.\d)", done.stdout)
    assert score, done.stdout
    assert float(score[1]) <= MOST
    page = (ROOT / "docs/operating/install.md").read_text()
    assert f"`systemd-analyze security` rates it {score[1]}" in page


def test_systemd_understands_all_of_it() -> None:
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(UNIT)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    # That the program is not installed in /opt here is no fault of the unit.
    printed = [line for line in done.stderr.splitlines() if UNIT.name in line and "/opt/" not in line]
    assert printed == []


def test_what_it_makes_can_be_written() -> None:
    unit = settings()
    made = {f"/run/{name}" for name in unit["RuntimeDirectory"]}
    made |= {f"/var/lib/{name}" for name in unit["StateDirectory"]}
    made |= {f"/var/log/{name}" for name in unit["LogsDirectory"]}
    assert set(unit["ReadWritePaths"]) == made
    assert unit["ProtectSystem"] == ["strict"]

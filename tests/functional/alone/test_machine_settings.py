"""The lab's own care for this machine: what a killed test of the tuning has changed is given back."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.machine_settings import (
    DEFAULTS,
    LEDGER,
    SYSCTLS,
    WORKQUEUES,
    changed,
    release,
    untuned,
    values,
)
from tests.lab.processes import LabError

INTERVAL = SYSCTLS / "vm/stat_interval"
#: Tunes the machine, says so, and waits for its end.
VICTIM = f"""
import sys
from pathlib import Path
from tests.lab.machine_settings import untuned
with untuned():
    Path({str(INTERVAL)!r}).write_text("77")
    Path({str(WORKQUEUES)!r}).write_text("1")
    print("tuned", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("finds", ["a sandbox that starts", "the next test"])
def test_what_a_kill_leaves_is_given_back_by_who_comes_next(finds: str) -> None:
    before = values()
    victim = subprocess.Popen(
        [sys.executable, "-c", VICTIM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert victim.stdout is not None and victim.stdout.readline() == "tuned\n"
        release()
        assert INTERVAL.read_text() == "77\n", "one that is alive keeps what it has changed"
    finally:
        victim.send_signal(signal.SIGKILL)
        victim.communicate()
    assert INTERVAL.read_text() == "77\n" and WORKQUEUES.read_text().strip() == "1"
    if finds == "the next test":
        with untuned():
            assert INTERVAL.read_text().strip() == DEFAULTS[INTERVAL]
            assert int(WORKQUEUES.read_text(), 16) > 1
    else:
        release()
    assert changed(before) == set() and not LEDGER.exists()


def test_what_the_kernel_refuses_is_reported_once_and_all_else_restored() -> None:
    before = values()
    asked = {**before, "/proc/version": "another", str(INTERVAL): "55\n"}
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    try:
        LEDGER.write_text(json.dumps({"boot": boot, "values": asked}))
        with pytest.raises(LabError, match=r"^/proc/version cannot be put back to 'another': .*$"):
            release()
        assert INTERVAL.read_text() == "55\n" and not LEDGER.exists()
        release()
    finally:
        INTERVAL.write_text(before[str(INTERVAL)])
    assert values() == before


def test_a_ledger_of_another_boot_changes_nothing() -> None:
    before = values()
    LEDGER.write_text('{"boot": "another", "values": {"/proc/sys/vm/stat_interval": "55"}}')
    release()
    assert values() == before and not LEDGER.exists()


def test_a_ledger_that_was_not_written_whole_changes_nothing() -> None:
    before = values()
    LEDGER.write_text('{"boot": "5')
    release()
    assert values() == before and not LEDGER.exists()

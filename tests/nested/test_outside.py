"""What happens in a guest is reported outside, and nothing of the guest stays on the machine."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import uuid
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.lab.kernel import CACHE
from tests.lab.processes import wait_for
from tests.nested import machine
from tests.nested.pulse import DEVICE

pytestmark = [pytest.mark.outside, pytest.mark.timeout(600)]

MARK = "NETPLUGIN_NESTED_MARK"
DEADLINE_S = 300.0
TESTS = """
import os
import signal
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.nested

def test_passes(tmp_path):
    assert sys.executable == os.environ["OUTER_PYTHON"]

def test_fails():
    print("said in the guest")
    assert Path("/nowhere").exists()

def test_skips():
    pytest.skip("a reason from the guest")

@pytest.mark.xfail(reason="it is known")
def test_is_known_to_fail():
    assert False

def test_stands():
    if os.environ["NETPLUGIN_LAB_GUEST"] == "1":
        for file in Path("/proc").glob("[0-9]*/fd/*"):
            if os.path.realpath(file) == "PULSE":
                os.kill(int(file.parts[2]), signal.SIGSTOP)
        signal.pause()

def test_ends_the_machine():
    Path("/proc/sysrq-trigger").write_text("o")
    time.sleep(60)

def test_comes_too_late():
    pass
""".replace("PULSE", str(DEVICE))
WAITS = """
import signal
import pytest

@pytest.mark.nested
def test_waits():
    signal.pause()
"""

# In the first guest the second test takes the only CPU without end, as a kernel that hangs would: in real
# time, without the share that Linux 6.12 keeps for other processes.
STANDS = """
import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.nested

def test_before():
    pass

def test_stands():
    if os.environ["NETPLUGIN_LAB_GUEST"] == "1":
        subprocess.run(["mount", "--no-mtab", "-t", "debugfs", "debugfs", "/sys/kernel/debug"], check=True)
        Path("/sys/kernel/debug/sched/fair_server/cpu0/runtime").write_text("0")
        Path("/proc/sys/kernel/sched_rt_runtime_us").write_text("-1")
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(99))
        while True:
            pass

def test_after():
    pass
"""


@contextmanager
def outer(directory: Path, tests: str) -> Iterator[subprocess.Popen[str]]:
    """A pytest with the plugin on some tests; afterwards the machine must be as it was."""
    path = directory / "test_of_the_guest.py"
    path.write_text(tests)
    temporary = directory / "temporary"
    temporary.mkdir()
    mark = str(uuid.uuid4())
    before = mounts()
    # A shell that runs us in the background has its children ignore a Ctrl-C.
    command = ["env", "--default-signal=INT", sys.executable, "-W", "ignore", "-m", "pytest"]
    command += ["-p", "no:cacheprovider"]
    command += ["-p", "tests.nested.plugin", "-m", "nested", "-v", "-ra"]
    with subprocess.Popen(
        [*command, f"--junit-xml={directory / 'junit.xml'}", path],
        cwd=machine.CHECKOUT,
        env={**os.environ, MARK: mark, "OUTER_PYTHON": sys.executable, "TMPDIR": str(temporary)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as running:
        try:
            yield running
        finally:
            running.kill()
    wait_for(lambda: not processes_with(mark), 30, "every process has ended")
    assert not shares_with(mark)
    assert not list(temporary.iterdir())
    assert mounts() <= before


def mounts() -> set[str]:
    return set(Path("/proc/self/mountinfo").read_text().splitlines())


def shares_with(mark: str) -> list[Path]:
    """The directories shared with a guest whose job has the mark."""
    jobs = CACHE.glob(f"{machine.SHARE_PREFIX}*/{machine.JOB}")
    return [job for job in jobs if mark.encode() in read(job)]


def processes_with(mark: str) -> list[str]:
    entry = f"{MARK}={mark}".encode()
    return [path.parent.name for path in Path("/proc").glob("[0-9]*/environ") if entry in read(path)]


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""  # it ended


@pytest.mark.long  # three guests, and a minute and a half
def test_each_outcome_in_guests_is_one_outside(tmp_path: Path) -> None:
    """The first guest has no heartbeat from the fifth test on; the second ends in the sixth."""
    with outer(tmp_path, TESTS) as running:
        printed, _ = running.communicate(timeout=2 * DEADLINE_S)
    assert running.returncode == pytest.ExitCode.TESTS_FAILED, printed
    assert "1 failed, 2 passed, 1 skipped, 1 xfailed, 2 errors" in printed, printed
    assert "said in the guest" in printed
    _require_replacement(printed, left=3)
    cases = {str(case.get("name")): case for case in junit(tmp_path)}
    assert len(cases["test_passes"]) == len(cases["test_stands"]) == 0
    failure = cases["test_fails"].find("failure")
    assert failure is not None and "/nowhere" in str(failure.text)
    skipped = cases["test_skips"].find("skipped")
    assert skipped is not None and skipped.get("message") == "a reason from the guest"
    ended = cases["test_ends_the_machine"].find("error")
    assert ended is not None and "the guest ended" in str(ended.text)
    assert "Power down" in str(ended.text), "the console's end is in the message"
    assert cases["test_comes_too_late"].find("error") is not None


def _require_replacement(printed: str, left: int) -> None:
    """The summary must say that a guest was replaced, with what was known of it and of its kernel."""
    replaced = printed.partition(f"replaced by a fresh guest for the {left} tests that were left")[2]
    for words in ("no heartbeat", "RIP=", "Not continuing"):
        assert words in replaced, printed


def junit(directory: Path) -> list[ElementTree.Element]:
    # A file of our own making, so no bomb.
    return list(ElementTree.parse(directory / "junit.xml").iter("testcase"))


@pytest.mark.long
def test_a_guest_whose_cpu_is_taken_for_good_is_replaced(tmp_path: Path) -> None:
    with outer(tmp_path, STANDS) as running:
        printed, _ = running.communicate(timeout=2 * DEADLINE_S)
    assert running.returncode == pytest.ExitCode.OK, printed
    assert "3 passed" in printed, printed
    assert [case.get("name") for case in junit(tmp_path)] == [
        "test_before",
        "test_stands",
        "test_after",
    ]
    _require_replacement(printed, left=2)


@pytest.mark.long
def test_an_interrupt_outside_ends_the_guest(tmp_path: Path) -> None:
    with outer(tmp_path, WAITS) as running:
        assert running.stdout is not None
        wait_for_line(running, "test_waits")
        running.send_signal(signal.SIGINT)
        printed, _ = running.communicate(timeout=30)
        assert running.returncode == pytest.ExitCode.INTERRUPTED, printed


def wait_for_line(running: subprocess.Popen[str], words: str) -> None:
    """Wait until a test is reported to be set up: pytest prints its name without a newline."""
    assert running.stdout is not None
    printed = b""
    while words.encode() not in printed:
        ready, _, _ = select.select([running.stdout], [], [], DEADLINE_S)
        more = os.read(running.stdout.fileno(), 4096) if ready else b""
        assert more, f"{words} did not come:\n{printed.decode()}"
        printed += more

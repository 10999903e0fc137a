"""A sandbox leaves nothing behind, however it ends. Run outside of one."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.lab import hugepages, kernel, sandbox
from tests.lab.inmates import Inmates, open_namespace
from tests.lab.processes import wait_for

pytestmark = pytest.mark.outside

PAGES = 140
READY_DEADLINE_S = 300.0
END_DEADLINE_S = 180.0
MARK = "NETPLUGIN_LAB_MARK"
WRITTEN_TO = ("/run", "/dev", "/sys/class/net", "/etc/libvirt", *map(str, sandbox.PRIVATE))
# Everything that could stay: daemons, QEMU, an orphan, links, a namespace, mounts, files, pages.
PAYLOAD = """
import json, os, signal, subprocess, sys
from pathlib import Path
from tests.lab.guest import Guest, domain_xml
from tests.lab.libvirtd import PrivateLibvirt
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import run
from tests.functional.lab.test_sandbox import files

subprocess.Popen(["sleep", "1000"], start_new_session=True)
run(["ip", "netns", "add", "left"])
run(["ip", "link", "add", "left", "type", "bridge"])
run(["mount", "-t", "tmpfs", "tmpfs", "/mnt"])
Path("/dev/shm/left").write_text("left")
Path("/dev/hugepages/left").touch()
with PrivateLibvirt() as daemons, PrivateOvs(Path("/run/ovs")) as ovs:
    ovs.vsctl("add-br", "br0", "--", "set", "Bridge", "br0", "datapath_type=netdev")
    guest = Guest("left")
    guest.start(daemons.connect(), domain_xml("left"))
    # Before it says that all is up: the signal may come the moment after.
    signal.signal(signal.SIGINT, lambda *_: sys.exit(5))
    print(json.dumps(sorted(files())), flush=True)
    sys.stdin.readline()
    if sys.argv[1] == "wait":
        signal.pause()
    if sys.argv[1] == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
sys.exit(7)
"""


@dataclass(frozen=True)
class Traces:
    """What a sandbox could change on the machine, on which others change things too."""

    pages: int
    mounts: frozenset[str]
    files: frozenset[str]


def traces() -> Traces:
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return Traces(hugepages.own_pages(), frozenset(mounts), files())


def files() -> frozenset[str]:
    return frozenset(
        str(Path(parent) / name)
        for top in WRITTEN_TO
        for parent, directories, names in os.walk(top)
        for name in (*directories, *names)
        if not parent.startswith(str(hugepages.LEDGER)) and name != hugepages.LEDGER.name
    )


def processes_with(mark: str) -> list[int]:
    return [pid for pid in _pids() if f"{MARK}={mark}".encode() in _environment(pid)]


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


@dataclass(frozen=True)
class Running:
    """A sandbox whose payload has everything up."""

    outer: subprocess.Popen[str]
    mark: str
    inmates: Inmates

    def ended(self) -> int:
        return self.outer.wait(END_DEADLINE_S)


def _process_1(outer: int) -> int:
    """The sandbox's first process: the child of ``unshare``, which is the outer's child."""
    [unshare] = _children(outer)
    [first] = _children(unshare)
    return first


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextmanager
def running(how: str, temporary: Path) -> Iterator[Running]:
    """A sandbox, of which nothing may be left afterwards."""
    before = traces()
    made: frozenset[str] = frozenset()
    mark = str(uuid.uuid4())
    args = [sys.executable, "-m", "tests.lab.sandbox", "--hugepages", str(PAGES), "--"]
    with subprocess.Popen(
        [*args, sys.executable, "-c", PAYLOAD, how],
        env={**os.environ, MARK: mark, "TMPDIR": str(temporary)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as outer:
        try:
            assert outer.stdin is not None and outer.stdout is not None
            # The payload prints one line, and only once everything is up.
            readable, _, _ = select.select([outer.stdout], [], [], READY_DEADLINE_S)
            assert readable, "the payload did not come up"
            made = frozenset(json.loads(outer.stdout.readline()))
            assert {"/run/ovs", "/dev/shm/left", "/sys/class/net/left"} <= made
            with Inmates(open_namespace(_process_1(outer.pid))) as inmates:
                assert len(inmates.pids()) > 1
                outer.stdin.write("go on\n")
                outer.stdin.flush()
                yield Running(outer, mark, inmates)
        finally:
            outer.kill()
    after = traces()
    assert after.pages == before.pages
    assert after.mounts == before.mounts
    assert not (after.files ^ before.files) & made, "the sandbox had it, and it came to the machine or went"
    assert not list(temporary.iterdir())


def assert_gone(sandboxed: Running) -> None:
    """Soon: the last process may be on its way out, without an environment and not yet out of its
    namespace (``do_exit`` in kernel/exit.c)."""
    wait_for(
        lambda: not (processes_with(sandboxed.mark) or sandboxed.inmates.pids()),
        60,
        "its processes are gone",
    )
    assert not (hugepages.LEDGER / f"{sandboxed.outer.pid}.json").exists()


@pytest.fixture(scope="module", autouse=True)
def guest_kernel() -> None:
    kernel.fetch()


@pytest.mark.parametrize(("how", "status"), [("end", 7), ("crash", 128 + signal.SIGKILL)])
def test_nothing_stays_after_the_command_ends(tmp_path: Path, how: str, status: int) -> None:
    with running(how, tmp_path) as sandboxed:
        assert sandboxed.ended() == status
        assert_gone(sandboxed)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 5), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_nothing_stays_after_a_signal(tmp_path: Path, number: signal.Signals, status: int) -> None:
    with running("wait", tmp_path) as sandboxed:
        # To the whole group, as a terminal does.
        os.killpg(sandboxed.outer.pid, number)
        assert sandboxed.ended() == status
        assert_gone(sandboxed)


def test_the_next_run_returns_what_a_killed_one_borrowed(tmp_path: Path) -> None:
    with running("wait", tmp_path) as sandboxed:
        sandboxed.outer.kill()
        sandboxed.ended()
        wait_for(lambda: not processes_with(sandboxed.mark), END_DEADLINE_S, "all is dead")
        subprocess.run(
            [sys.executable, "-m", "tests.lab.sandbox", "--", "true"],
            check=True,
            timeout=END_DEADLINE_S,
        )
        assert_gone(sandboxed)


def test_a_command_that_is_not_there() -> None:
    args = [sys.executable, "-m", "tests.lab.sandbox", "--", "no-such-command"]
    assert subprocess.run(args, check=False, timeout=END_DEADLINE_S).returncode == 127

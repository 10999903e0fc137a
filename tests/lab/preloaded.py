"""A program without the time it takes to import: each run is a fork of a process that has imported it.

Tests start hundreds of agents. Nearly all that a start costs is imports: 0.7 s of a CPU, and ten times
as much in a guest without KVM. What runs is a process of its own, that may be signalled, killed and
paused like any other; only its command line in /proc is that of the process it was forked from.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from netplugin.data_path import installed

# What the agent imports only when it runs, next to its drivers.
WITH_AGENT = (
    "agents.host.domains",
    "encodings.idna",
    "pydantic.v1",  # of which FastAPI asks whether a model is one
    "uvicorn.loops.asyncio",
    "uvicorn.protocols.http.httptools_impl",
)
_MAX_BYTES = 1 << 17
_FILES = 2  # the log and the network namespace
# linux/prctl.h, linux/capability.h
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 24, 38
_CAPABILITY_VERSION_3 = 0x20080522
_CLONE_NEWNS = 0x00020000  # linux/sched.h
_MS_REC_SLAVE = 1 << 14 | 1 << 19  # sys/mount.h
_MNT_DETACH = 2


class Run:
    """A run, to whom it was started for: what the lab uses of ``subprocess.Popen``."""

    def __init__(self, program: Program, pid: int) -> None:
        self._program = program
        self._status: int | None = None
        self.pid = pid

    def poll(self) -> int | None:
        if self._status is None:
            self._status = self._program.status(self.pid)
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        """Raises ``subprocess.TimeoutExpired``, after ``timeout`` seconds."""
        while (status := self.poll()) is None:
            ended = os.pidfd_open(self.pid)
            try:
                if not select.select([ended], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            finally:
                os.close(ended)
        return status


class Program:
    """The process that has imported a module, to run its ``main``; it ends when we do."""

    def __init__(self, module: str, *others: str) -> None:
        """``others`` are modules that it imports later."""
        self._lock = threading.Lock()
        self._calls, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), module, *others],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # an interrupt is for pytest
            )

    def start(
        self,
        arguments: Sequence[str],
        env: Mapping[str, str],
        log: int,
        own_sys: bool = False,
        capabilities: Collection[str] | None = None,
    ) -> Run:
        """Run it where this thread is: directory and network namespace. ``log``: a file's descriptor.

        ``own_sys``: with the /sys of the namespace, as ``ip netns exec`` gives it. ``capabilities``: all
        that it has and can get, by their names in capabilities(7).
        """
        network = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            call = {
                "arguments": list(arguments),
                "env": dict(env),
                "directory": os.getcwd(),
                "own_sys": own_sys,
                "capabilities": None if capabilities is None else numbers(capabilities),
            }
            return Run(self, self._call(call, [log, network]))
        finally:
            os.close(network)

    def status(self, pid: int) -> int | None:
        """The exit status, None while it runs, negative for a signal."""
        status: int | None = self._call({"ended": pid})
        return status

    def _call(self, call: Mapping[str, Any], files: Sequence[int] = ()) -> Any:
        with self._lock:
            socket.send_fds(self._calls, [json.dumps(call).encode()], files)
            answer = self._calls.recv(_MAX_BYTES)
        if not answer:
            raise RuntimeError(f"{self._process.args!r} has ended ({self._process.poll()})")
        return json.loads(answer)


@functools.cache
def agent() -> Program:
    """One for all agents of this process."""
    drivers = (driver.module for driver in installed())
    return Program("agents.main", *WITH_AGENT, *drivers)


def _serve(calls: socket.socket) -> list[str]:
    """Answer until the other end is closed. Returns in each run, with its arguments."""
    while True:
        message, files, _, _ = socket.recv_fds(calls, _MAX_BYTES, _FILES)
        if not message:
            raise SystemExit(0)
        call = json.loads(message)
        if "ended" in call:
            pid, status = os.waitpid(call["ended"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        elif (answer := os.fork()) == 0:
            calls.close()
            _become(call, *files)
            arguments: list[str] = call["arguments"]
            return arguments
        for file in files:
            os.close(file)
        calls.send(json.dumps(answer).encode())


def _become(call: Mapping[str, Any], log: int, network: int) -> None:
    """What ``subprocess`` and setpriv do for one that is started."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) or libc.setns(network, 0):
        raise OSError(ctypes.get_errno(), "prctl or setns")
    if call["own_sys"]:
        _mount_sys(libc)
    os.setsid()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.close(network)
    os.chdir(call["directory"])
    os.environ.clear()
    os.environ.update(call["env"])
    if call["capabilities"] is not None:
        keep(call["capabilities"])


def _mount_sys(libc: ctypes.CDLL) -> None:
    """Mount the /sys of this network namespace, for this process alone (``ip netns exec``)."""
    if (
        libc.unshare(_CLONE_NEWNS)
        or libc.mount(b"", b"/", b"none", ctypes.c_ulong(_MS_REC_SLAVE), None)
        or libc.umount2(b"/sys", _MNT_DETACH)
        or libc.mount(b"netplugin", b"/sys", b"sysfs", ctypes.c_ulong(0), None)
    ):
        raise OSError(ctypes.get_errno(), "the namespace's own /sys")


def numbers(capabilities: Collection[str]) -> list[int]:
    """Of capabilities by their names."""
    known = subprocess.run(["setpriv", "--list-caps"], capture_output=True, text=True, check=True)
    names = [f"CAP_{name.upper()}" for name in known.stdout.split()]
    return [names.index(name) for name in capabilities]


def keep(capabilities: Collection[int]) -> None:
    """Leave this thread these alone, as ``setpriv --bounding-set --no-new-privs`` leaves root.

    What it starts then, threads and programs, has no others either (capabilities(7)).
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/sys/kernel/cap_last_cap") as file:
        last = int(file.read())
    dropped = [number for number in range(last + 1) if number not in capabilities]
    mask = sum(1 << number for number in capabilities)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    # Effective, permitted, inheritable; twice.
    data = (ctypes.c_uint32 * 6)(low, low, 0, high, high, 0)
    if (
        any(libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0) for number in dropped)
        or libc.capset(header, data)
        or libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    ):
        raise OSError(ctypes.get_errno(), "capabilities")


def _main() -> int:
    calls = socket.socket(fileno=int(sys.argv[1]))
    module, *_ = [importlib.import_module(name) for name in sys.argv[2:]]
    installed()  # read here, and not in each run
    assert threading.active_count() == 1, "a fork has one thread only"
    gc.freeze()  # no collection writes to the pages that the runs share
    sys.argv[1:] = _serve(calls)
    status: int = module.main()
    return status


if __name__ == "__main__":
    sys.exit(_main())

"""Starts ``t-rex-64`` as a server or for one batch, here or over SSH, and ends it with its children."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Final

from netplugin_zeroloss.generators.owned_program import OwnedProgram, log_tail
from netplugin_zeroloss.machines import Local, Machine, MachineError
from netplugin_zeroloss.values import GeneratorError, UnusableInput

PROGRAM: Final = "t-rex-64"
#: Seconds to set up hugepages, drivers and links.
_START_S: Final = 120.0
#: Seconds the program may take to clean up after SIGINT.
_STOP_S: Final = 20.0
_LOOK_S: Final = 0.2


def check_tree(machine: Machine, trex_dir: Path) -> None:
    """Check that TRex can be started on a machine. Raises: UnusableInput."""
    if not machine.has("-f", trex_dir / PROGRAM):
        raise UnusableInput("--trex-dir", f"{trex_dir} is no tree of TRex: it has no {PROGRAM}")
    is_root = os.geteuid() == 0 if isinstance(machine, Local) else machine.run(["id", "-u"]).strip() == "0"
    if not is_root:
        raise UnusableInput(PROGRAM, "TRex needs root: it takes ports from the kernel")
    try:
        machine.run([machine.python, "-I", "-c", "from os import pidfd_open"])
    except MachineError as error:
        raise UnusableInput(PROGRAM, f"its machine needs python3 of version 3.9 or later: {error}") from error


def started(machine: Machine, trex_dir: Path, arguments: Sequence[str]) -> OwnedProgram:
    """Start it in its directory, where it finds its files. The caller closes it."""
    return OwnedProgram([f"./{PROGRAM}", *arguments], _STOP_S, str(trex_dir), machine)


def serving(trex_dir: Path, configuration: Path, sync_port: int) -> OwnedProgram:
    """Start a server for stateless clients, and wait until it listens. The caller closes it.

    Raises: UnusableInput, GeneratorError.
    """
    if not configuration.is_file():
        raise UnusableInput("--trex-cfg", f"{configuration}: no such file")
    with closing(Local()) as machine:
        check_tree(machine, trex_dir)
        if _listens(sync_port):
            raise GeneratorError(
                f"port {sync_port} is taken: does another TRex run? Leave out --trex-cfg to use it, or"
                " give this one other ports (zmq_rpc_port, zmq_pub_port) and say them"
                " (--trex-sync-port, --trex-async-port)"
            )
        arguments = ["-i", "--no-scapy-server", "--cfg", str(configuration.resolve())]
        server = started(machine, trex_dir, arguments)
    with ExitStack() as failed:
        failed.callback(server.close)
        deadline = time.monotonic() + _START_S
        while not _listens(sync_port):
            late = time.monotonic() > deadline
            if late or server.wait(_LOOK_S):
                what = f"does not answer on port {sync_port} after {_START_S:g} s" if late else "ended"
                raise GeneratorError(f"{PROGRAM} {what}:\n{log_tail(server.output)}")
        failed.pop_all()
    return server


def _listens(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 1.0):
            return True
    except OSError:
        return False

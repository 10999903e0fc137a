"""Stand-ins for what is beyond this machine: ssh, whose commands run here, and a VM behind a serial port."""

from __future__ import annotations

import os
import pty
import select
import socket
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

#: What is to run on the machine runs here, and a tunnel is a link to the socket.
SSH = """#!/bin/sh
echo "$@" >> "$SSH_LOG"
while [ $# -gt 1 ]; do
  [ "$1" = -L ] && ln -s "${2#*:}" "${2%%:*}" && exec sleep 60
  shift
done
exec sh -c "$1"
"""
#: In place of vpp: makes its API's socket and waits.
VPP = f"""#!{sys.executable} -ES
import re, socket, sys, time
conf = open(sys.argv[2]).read()
server = socket.socket(socket.AF_UNIX)
server.bind(re.search("socket-name (.*api.sock)", conf)[1])
time.sleep(60)
"""


def install(folder: Path, patch: pytest.MonkeyPatch, **programs: str) -> Path:
    """Put programs before all others; returns where ssh logs its arguments."""
    for name, text in programs.items():
        program = folder / name
        program.write_text(text)
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    patch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    patch.setenv("SSH_LOG", str(folder / "log"))
    return folder / "log"


#: Asks for a name and a password as getty and login do, then is a shell.
_LOG_IN = """
stty -echo
while :; do
  printf 'Debian GNU/Linux 12 vm ttyS0\\n\\nvm login: '; read -r user || exit
  case $user in '') continue ;; esac
  printf 'Password: '; read -r password
  if [ "$user:$password" = root:secret ]; then stty echo; PS1='\\033[?2004hroot@vm:~# ' sh -i; stty -echo
  else echo 'Login incorrect'; fi
done
"""
Change = Callable[[bytes], bytes]


@contextmanager
def console(path: Path, to_vm: Change = bytes, from_vm: Change = bytes) -> Iterator[Path]:
    """A VM whose serial port is a UNIX socket, one client at a time. The changes garble what passes."""
    child, terminal = pty.fork()
    if child == 0:
        os.execvp("sh", ["sh", "-c", _LOG_IN])
    ended = threading.Event()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen(1)
        server.settimeout(0.1)
        thread = threading.Thread(target=_serve, args=(server, terminal, ended, to_vm, from_vm))
        thread.start()
        try:
            yield path
        finally:
            ended.set()
            thread.join()
            # The terminal hangs up, and with it the shell.
            os.close(terminal)
            os.waitpid(child, 0)


def _serve(
    server: socket.socket, terminal: int, ended: threading.Event, to_vm: Change, from_vm: Change
) -> None:
    while not ended.is_set():
        with suppress(TimeoutError):
            connection, _ = server.accept()
            with connection:
                _pump(connection, terminal, ended, to_vm, from_vm)


def _pump(
    connection: socket.socket, terminal: int, ended: threading.Event, to_vm: Change, from_vm: Change
) -> None:
    while not ended.is_set():
        ready = select.select([connection, terminal], [], [], 0.1)[0]
        if connection in ready:
            data = connection.recv(4096)
            if not data:
                return
            os.write(terminal, to_vm(data))
        if terminal in ready:
            with suppress(BrokenPipeError):
                connection.sendall(from_vm(os.read(terminal, 4096)))

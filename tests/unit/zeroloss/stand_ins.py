"""Stand-ins for what is beyond this machine: ssh, whose commands run here, and VPP."""

from __future__ import annotations

import os
import stat
import sys
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

"""Carries out a session of the documentation in one bash, block by block, and keeps what it prints."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.docs.blocks import output_matches, session
from tests.lab.processes import LabError

_BLOCK = "--- block "
_DEADLINE_S = 480.0


def carry_out(
    name: str,
    log: Path,
    env: Mapping[str, str] | None = None,
    cwd: Path = Path("/"),
    scratch: Path | None = None,
) -> None:
    """Raises: LabError with all that was printed, if a command fails or prints something else.

    ``netplugin`` and ``netplugin-agent`` are those of the tests' own virtualenv. ``scratch`` takes the
    place of /tmp in the commands and their output.
    """
    steps = session(name)
    script = ["set -e -o pipefail"]
    for number, (block, _) in enumerate(steps):
        script += [f"echo; echo '{_BLOCK}{number}'", _moved(block.text, scratch)]
    status = _bash("\n".join(script), log, env or {}, cwd)
    text = log.read_text()
    printed = re.split(rf"^{_BLOCK}\d+\n", text, flags=re.MULTILINE)[1:]
    if status != 0:
        where = steps[len(printed) - 1][0].where
        raise LabError(f"{where}: the session {name} ended with status {status}\n{text}")
    for (block, output), what in zip(steps, printed, strict=True):
        if output is not None and not output_matches(_moved(output.text, scratch), what):
            raise LabError(f"{output.where}: this is not what {block.where} printed:\n{what}")


def _moved(text: str, scratch: Path | None) -> str:
    return text if scratch is None else text.replace("/tmp/", f"{scratch}/")


def _bash(script: str, log: Path, env: Mapping[str, str], cwd: Path) -> int:
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with log.open("wb") as output:
        bash = subprocess.Popen(
            ["bash", "-c", script],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=cwd,
            env={**os.environ, "PATH": programs, "LC_ALL": "C.UTF-8", **env},
            start_new_session=True,
        )
        try:
            return bash.wait(_DEADLINE_S)
        except subprocess.TimeoutExpired:
            return -signal.SIGALRM
        finally:
            # What the session left in the background, too.
            try:
                os.killpg(bash.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            bash.wait()

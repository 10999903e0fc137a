"""Programs that cannot be started are errors of the host, with a step and a fix."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from netplugin.api.errors import HostError
from netplugin.host.processes import run

DEADLINE_S = 90.0


def _refused(program: str) -> HostError:
    with pytest.raises(HostError) as refused:
        run([program], step="probe", deadline=time.monotonic() + DEADLINE_S)
    assert refused.value.step == "probe" and refused.value.fix
    return refused.value


def test_a_file_that_the_kernel_cannot_execute(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_bytes(b"\x7fELF")
    program.chmod(0o755)
    assert os.strerror(errno.ENOEXEC) in _refused(str(program)).detail


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM, errno.EMFILE])
def test_a_host_that_can_start_no_process(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert os.strerror(number) in _refused("nft").detail


def test_output_that_is_no_utf8_is_text_all_the_same() -> None:
    deadline = time.monotonic() + DEADLINE_S
    assert run(["printf", "a\\377b"], step="probe", deadline=deadline) == "a\N{REPLACEMENT CHARACTER}b"
    with pytest.raises(HostError, match="\N{REPLACEMENT CHARACTER}"):
        run(["sh", "-c", "printf '\\377' >&2; exit 1"], step="probe", deadline=deadline)

"""Ansible's own programs, without the network: they play a playbook on this machine, and lint it."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.lab.processes import run

DEADLINE_S = 240.0


def lint(directory: Path, *playbooks: Path) -> None:
    """Raises: CommandError with what ansible-lint says, if it says anything at all."""
    program = Path(sys.executable).with_name("ansible-lint")
    profile = ["--offline", "--nocolor", "--profile", "production", "--strict"]
    run([program, *profile, *playbooks], DEADLINE_S, env=_environment(directory), cwd=directory)


@dataclass(frozen=True)
class Played:
    """What a play came to on this machine; tasks and handlers by their names, and all that was printed."""

    tasks: tuple[str, ...]
    changes: frozenset[str]
    changed: int
    reported: str


def play(
    directory: Path, playbook: Path, *, check: bool = False, env: Mapping[str, str] | None = None
) -> Played:
    """Raises: CommandError if a task fails."""
    program = Path(sys.executable).with_name("ansible-playbook")
    here = ["--inventory", "localhost,", "--connection", "local"]
    here += ["--extra-vars", "ansible_python_interpreter=/usr/bin/python3"]
    mode = ["--check"] if check else []
    environment = {**_environment(directory), **(env or {})}
    reported = run([program, *here, *mode, playbook], DEADLINE_S, env=environment, cwd=directory)
    # A head for each task, and below it a line for each of its results.
    _, *parts = re.split(r"^(?:TASK|RUNNING HANDLER) \[(.*)\] \**$", reported, flags=re.MULTILINE)
    results = dict(zip(parts[::2], parts[1::2], strict=True))
    [changed] = re.findall(r"^localhost .* changed=(\d+) ", reported, re.MULTILINE)
    return Played(
        tasks=tuple(results),
        changes=frozenset(n for n, text in results.items() if "\nchanged: [localhost]" in text),
        changed=int(changed),
        reported=reported,
    )


def _environment(directory: Path) -> dict[str, str]:
    """All it keeps is below the directory, and nothing of the machine's configuration counts."""
    configuration = directory / "ansible.cfg"
    configuration.touch()
    return {
        "ANSIBLE_CONFIG": str(configuration),
        "ANSIBLE_HOME": str(directory / "ansible"),
        "ANSIBLE_NOCOLOR": "1",
        # Modules go through a pipe and not through files: a third of the time.
        "ANSIBLE_PIPELINING": "1",
        "HOME": str(directory),
        "LC_ALL": "C.UTF-8",
    }

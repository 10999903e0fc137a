"""Tasks that give kernel threads a real-time priority where it differs."""

from __future__ import annotations

from collections.abc import Iterator

from netplugin.tuning.output.tasks import Task, command


def thread_tasks(threads: str, priority: str) -> Iterator[Task]:
    """``threads`` is the name without CPU number: ``ksoftirqd``."""
    register = f"netplugin_{threads}"
    yield {
        "name": f"Read the priorities of {threads}",
        "ansible.builtin.command": {"argv": ["ps", "-e", "-o", "pid=,cls=,rtprio=,comm="]},
        "register": register,
        "changed_when": False,
        "check_mode": False,
    }
    pattern = rf"^\s*\d+\s+(?!FF\s+{priority}\s)\S+\s+\S+\s+{threads}/"
    task = command(
        f"Set the priorities of {threads}",
        "chrt", "--fifo", "--pid", priority, "{{ (item | split)[0] }}",
    )  # fmt: skip
    yield task | {
        "loop": f"{{{{ {register}.stdout_lines | select('match', '{pattern}') | list }}}}"
    }

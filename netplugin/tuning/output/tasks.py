"""Builders for common Ansible tasks."""

from __future__ import annotations

from typing import Any, TypeAlias

Task: TypeAlias = dict[str, Any]


def command(name: str, *words: str) -> Task:
    return {
        "name": name,
        "ansible.builtin.command": {"argv": list(words)},
        "changed_when": True,
    }


def file_with(name: str, path: str, lines: list[str]) -> Task:
    """Write a whole file that netplugin owns."""
    return {
        "name": name,
        "ansible.builtin.copy": {
            "dest": path,
            "content": "# Made by netplugin.\n" + "".join(f"{line}\n" for line in lines),
            "mode": "0644",
        },
    }


def notified(task: Task, handler: str) -> Task:
    return task | {"notify": handler}

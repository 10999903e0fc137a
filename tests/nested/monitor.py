"""Asks a QEMU whose guest stands what its CPUs do, by QMP (docs/interop/qmp-spec.rst of QEMU)."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from typing import Any

ANSWER_S = 30.0
# The kernel panics (`unknown_nmi_panic`), tells where it was, and QEMU ends.
_PANIC_S = 45.0
_COMMANDS = ("info status", "info cpus", "info registers -a")
# Of the registers those that say which code runs, and whether the CPU is halted.
_RELEVANT = re.compile(r"CPU#|[RE]IP=|VM status|thread_id")


def examine(channel: socket.socket) -> str:
    """What the monitor reports of the CPUs. Then the kernel is made to panic, for its call trace."""
    printed = []
    try:
        channel.settimeout(ANSWER_S)
        lines = _lines(channel)
        next(lines, None)  # the greeting
        _ask(channel, lines, "qmp_capabilities")
        for command in _COMMANDS:
            line = {"command-line": command}
            answer = str(_ask(channel, lines, "human-monitor-command", line))
            printed += [f"{command}:", *filter(_RELEVANT.search, answer.splitlines())]
        channel.settimeout(_PANIC_S)
        _ask(channel, lines, "inject-nmi")
        for _event in lines:
            pass  # until QEMU has ended
    except (OSError, ValueError) as error:
        printed.append(f"QEMU's monitor: {error!r}")
    return "\n".join(printed)


def _ask(
    channel: socket.socket, lines: Iterator[dict[str, Any]], command: str, arguments: object = None
) -> object:
    question: dict[str, object] = {"execute": command}
    if arguments is not None:
        question["arguments"] = arguments
    channel.sendall(json.dumps(question).encode() + b"\n")
    for answer in lines:
        if "event" not in answer:  # those come at any time
            return answer.get("return", answer)
    raise ConnectionError(f"it ended at {command}")


def _lines(channel: socket.socket) -> Iterator[dict[str, Any]]:
    received = b""
    while more := channel.recv(1 << 16):
        *whole, received = (received + more).split(b"\n")
        yield from (json.loads(line) for line in whole if line.strip())

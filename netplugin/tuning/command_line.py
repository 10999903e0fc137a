"""The kernel's command line: its arguments, and the CPUs that some of them name."""

from __future__ import annotations

import re
from dataclasses import dataclass

from netplugin.host.cpus import parse_list

# Quotes keep white space in a value (Documentation/admin-guide/kernel-parameters.rst).
_WORD = re.compile(r'(?:[^\s"]|"[^"]*")+')


@dataclass(frozen=True)
class CommandLine:
    """The arguments in their order; a word without ``=`` has the value None."""

    arguments: tuple[tuple[str, str | None], ...]

    def value(self, name: str) -> str | None:
        """Its last value, as the last one counts; None if it is not there, empty for a bare word."""
        found = None
        for key, value in self.arguments:
            if key == name:
                found = value or ""
        return found

    def cpus(self, name: str) -> frozenset[int]:
        """The CPUs of ``isolcpus`` and its like, without the flags before them. Raises: ValueError."""
        words = (self.value(name) or "").split(",")
        return frozenset(parse_list(",".join(word for word in words if word[:1].isdigit())))


def parse(text: str) -> CommandLine:
    """Words after ``--`` are init's and not the kernel's."""
    arguments: list[tuple[str, str | None]] = []
    for word in _WORD.findall(text):
        if word == "--":
            break
        name, equals, value = word.replace('"', "").partition("=")
        arguments.append((name, value if equals else None))
    return CommandLine(tuple(arguments))

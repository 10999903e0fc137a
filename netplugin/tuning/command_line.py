"""Parser for the kernel command line and for CPU lists in its arguments."""

from __future__ import annotations

import re
from dataclasses import dataclass

from netplugin.host.cpus import parse_list

# A quoted value may contain white space (Documentation/admin-guide/kernel-parameters.rst).
_WORD = re.compile(r'(?:[^\s"]|"[^"]*")+')


@dataclass(frozen=True)
class CommandLine:
    """Arguments in order; one without ``=`` has the value None."""

    arguments: tuple[tuple[str, str | None], ...]

    def value(self, name: str) -> str | None:
        """The last, effective value of an argument; None if absent, empty for one without ``=``."""
        found = None
        for key, value in self.arguments:
            if key == name:
                found = value or ""
        return found

    def cpus(self, name: str) -> frozenset[int]:
        """CPUs of an argument like ``isolcpus``, without its leading flags. Raises: ValueError."""
        words = (self.value(name) or "").split(",")
        return frozenset(parse_list(",".join(word for word in words if word[:1].isdigit())))


def parse(text: str) -> CommandLine:
    """Parse a command line up to ``--``; the words after it belong to init."""
    arguments: list[tuple[str, str | None]] = []
    for word in _WORD.findall(text):
        if word == "--":
            break
        name, equals, value = word.replace('"', "").partition("=")
        arguments.append((name, value if equals else None))
    return CommandLine(tuple(arguments))

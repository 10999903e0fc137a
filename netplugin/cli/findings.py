"""Base class of commands that print findings as a table; the exit status is 1 if a check fails."""

from __future__ import annotations

from abc import abstractmethod
from argparse import Namespace
from collections.abc import Iterable, Sequence
from typing import Any

from cliff.lister import Lister

from netplugin.cli import show
from netplugin.models import Finding


class FindingLister(Lister):
    """A command that lists findings."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._status = 0

    @abstractmethod
    def find(self, parsed_args: Namespace) -> Iterable[Finding]: ...

    def take_action(self, parsed_args: Namespace) -> tuple[Sequence[str], Iterable[show.Row]]:
        findings = list(self.find(parsed_args))
        self._status = 1 if any(finding.status == "fail" for finding in findings) else 0
        return ("id", "status", "found", "expected", "fix"), [
            (f.id, f.status, f.found, f.expected, show.Optional(f.fix)) for f in findings
        ]

    def run(self, parsed_args: Namespace) -> int:
        return super().run(parsed_args) or self._status

"""Findings of the checks before a run: what was found and, if it is wrong, what mends it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from netplugin.api.errors import NetpluginError
from netplugin_zeroloss.values import UnusableInput


@dataclass(frozen=True, slots=True)
class Finding:
    """``part``: what was checked, in one word. ``fix`` None: it is as it must be."""

    part: str
    found: str
    fix: str | None = None

    @property
    def missing(self) -> bool:
        return self.fix is not None


def of_error(part: str, error: NetpluginError, fix: str) -> Finding:
    """Return a finding with the fix of the error, or else with this one."""
    return Finding(part, error.detail, error.fix or fix)


def require(findings: Iterable[Finding]) -> None:
    """Refuse the run for all findings that have a fix, in one list.

    Raises: UnusableInput.
    """
    missing = list(dict.fromkeys(finding for finding in findings if finding.missing))
    if missing:
        count = f"{len(missing)} finding{'s' if len(missing) > 1 else ''}, and nothing was sent"
        lines = (f"{each.part}: {each.found}\n  fix: {each.fix}" for each in missing)
        raise UnusableInput(count, "\n" + "\n".join(lines))

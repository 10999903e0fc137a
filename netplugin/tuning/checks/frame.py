"""Bind rules to scopes: a rule is a pure function of one value of its scope, and sees nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from netplugin.api.models import Finding
from netplugin.tuning.checks.scene import Scene

S = TypeVar("S")


@dataclass(frozen=True)
class Scope(Generic[S]):
    """What rules can be about, such as a NUMA node: how each is made from a scene, and the rules for it."""

    name: str
    make: Callable[[Scene], Iterable[S]]
    rules: tuple[Callable[[S], Iterable[Finding]], ...]

    def findings(self, scene: Scene) -> Iterator[Finding]:
        for one in self.make(scene):
            for rule in self.rules:
                yield from rule(one)


def warn(about: str, found: str, expected: str, fix: str | None) -> Finding:
    """What needs no fix is ok."""
    return Finding(id=about, status="warn" if fix else "ok", found=found, expected=expected, fix=fix)


def fail(about: str, found: str, expected: str, fix: str | None) -> Finding:
    return Finding(id=about, status="fail" if fix else "ok", found=found, expected=expected, fix=fix)


def graded(
    about: str, wrong: str | None, found: str, expected: str, fix: str, say: Callable[..., Finding] = warn
) -> Finding:
    """What is ``wrong``, or an ok finding with ``found``."""
    return say(about, found, expected, None) if wrong is None else say(about, wrong, expected, fix)

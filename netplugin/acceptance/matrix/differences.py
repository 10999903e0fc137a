"""Checks that a resumed run still has the same description."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from netplugin.acceptance.errors import UnusableInput
from netplugin.acceptance.matrix.description import Description


def differences(before: Description, now: Description) -> list[str]:
    """Return one line per changed field: ``search.precision: 0.005 before, 0.01 now``."""
    return list(_differences("", before.model_dump(mode="json"), now.model_dump(mode="json")))


def check_same(before: Description, now: Description, folder: str) -> None:
    """Raises: UnusableInput if the description of a resumed run has changed."""
    found = differences(before, now)
    if found:
        raise UnusableInput(folder, "its run has another description:\n" + "\n".join(found))


def _differences(where: str, before: Any, now: Any) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        for name in sorted({*before, *now}):
            yield from _differences(
                f"{where}.{name}" if where else name, before.get(name), now.get(name)
            )
    elif before != now:
        yield f"{where}: {before} before, {now} now"

"""Whether a run that is resumed has the description that it was begun with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from netplugin.acceptance.errors import UnusableInput
from netplugin.acceptance.matrix.description import Description


def differences(before: Description, now: Description) -> list[str]:
    """What is not the same, a line for each field: ``search.precision: 0.005 before, 0.01 now``."""
    return list(_differences("", before.model_dump(mode="json"), now.model_dump(mode="json")))


def check_same(before: Description, now: Description, folder: str) -> None:
    """Raises: UnusableInput if a run that is resumed would be another one."""
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

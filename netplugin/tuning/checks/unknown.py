"""Report facts that could not be read, so that a check without data does not look like a passed one."""

from __future__ import annotations

from collections.abc import Iterator

from netplugin.models import Finding
from netplugin.tuning.checks.scene import Scene

#: Maximum number of files named in one finding; the facts list all.
_SHOWN = 4


def unknown(scene: Scene) -> Iterator[Finding]:
    """One finding per reason, as a container can deny access to hundreds of files.

    A daemon that runs but does not answer counts as an unreadable file.
    """
    paths: dict[tuple[str, str | None], list[str]] = {}
    for fact in (*scene.facts.unknown(), *scene.live.unanswered()):
        paths.setdefault((fact.reason, fact.fix), []).append(fact.path)
    for (reason, fix), refused in paths.items():
        more = f" and {len(refused) - _SHOWN} more" if len(refused) > _SHOWN else ""
        yield Finding(
            id="unknown-fact", status="warn", found=f"{', '.join(refused[:_SHOWN])}{more}: {reason}",
            expected="files that can be read and made sense of, daemons that answer",
            fix=fix or "run it as root, on the host itself and not in a container",
        )  # fmt: skip

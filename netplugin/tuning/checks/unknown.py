"""What could not be read: a check that saw nothing must not look like one that found nothing."""

from __future__ import annotations

from collections.abc import Iterator

from netplugin.models import Finding
from netplugin.tuning.checks.scene import Scene

#: Files named in one finding; the facts have all.
_SHOWN = 4


def unknown(scene: Scene) -> Iterator[Finding]:
    """A finding for each reason: in a container hundreds of files are refused at once.

    A daemon that is there and does not answer is as a file that cannot be read.
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

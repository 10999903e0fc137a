"""Compare the host with its plan: one finding per group of steps."""

from __future__ import annotations

from collections.abc import Iterator

from netplugin.api.models import Finding
from netplugin.tuning.checks.scene import Scene
from netplugin.tuning.root import Fact, Unknown
from netplugin.tuning.steps import Effect, Group, Step

_FIX = {
    Effect.LIVE: "netplugin host apply shows the steps, and takes them with --yes",
    Effect.OVS_RESTART: "set them and restart OVS when its VMs can spare it",
    Effect.REBOOT: "set them and boot again",
}
#: Maximum number of steps named in one finding; the plan lists all.
_SHOWN = 4


def planned(scene: Scene) -> Iterator[Finding]:
    """One finding per group of steps, except hugepages, which have their own check."""
    if scene.plan is None:
        return
    for group in Group:
        steps = [step for step in scene.plan.steps if step.group is group]
        if not steps or group is Group.HUGEPAGES:
            continue
        left = [step for step in steps if not step.done]
        slowest = max((step.effect for step in left), key=list(Effect).index, default=Effect.LIVE)
        yield Finding(
            id=f"plan-{group}",
            status="warn" if left else "ok",
            found=_some(left, wanted=False) if left else f"all {len(steps)} as planned",
            expected=_some(left, wanted=True) if left else "as planned",
            fix=_FIX[slowest] if left else None,
        )


def _some(steps: list[Step], wanted: bool) -> str:
    """The first steps as text; values unknown for a common reason give that reason once."""
    reasons = {step.now for step in steps if isinstance(step.now, Unknown)}
    if not wanted and len(reasons) == 1 and all(isinstance(s.now, Unknown) for s in steps):
        return str(reasons.pop())
    parts = [_text(step, step.wanted if wanted else step.now) for step in steps[:_SHOWN]]
    more = len(steps) - _SHOWN
    return "; ".join(parts) + (f"; and {more} more" if more > 0 else "")


def _text(step: Step, value: Fact[str | None]) -> str:
    if isinstance(value, Unknown):
        return f"{step.target} is unknown: {value.reason}"
    return f"{step.target} is {'not set' if value is None else value}"


# -- Report facts that could not be read, so that a check without data does not look like a passed one.


#: Maximum number of files named in one finding; the facts list all.


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
            id="unknown-fact",
            status="warn",
            found=f"{', '.join(refused[:_SHOWN])}{more}: {reason}",
            expected="files that can be read and made sense of, daemons that answer",
            fix=fix or "run it as root, on the host itself and not in a container",
        )

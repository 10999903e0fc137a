"""What ``host verify effect`` keeps while it measures before, applies, and measures after a reboot.

Each call goes on where the last one ended. Applying is repeated by each call until nothing is left for a
reboot or a restart of OVS: it changes only what is not as planned, and a reboot resets some of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from netplugin.api.errors import Conflict, HostError
from netplugin.api.field_errors import valid
from netplugin.api.fields import Value
from netplugin.host.safe_files import read_own
from netplugin.tuning.intent import HostIntent
from netplugin.tuning.verifying import result
from netplugin.tuning.verifying.options import Options
from netplugin.tuning.verifying.result import MeasuredRun

STEP = "effect"
#: File of the state, next to the runs, while the effect is not measured yet.
STATE = "effect.state"
_DISCARD = "give the same, or begin again: --discard"


class EffectState(Value):
    """``before``: file name of the run before, None until it is measured."""

    format: Literal[1] = 1
    options: Options
    intent: HostIntent
    before: str | None = None

    def options_before(self) -> Options:
        """The VM before is as one on a host without a plan. Raises: InvalidRequest for a label too long."""
        return self._options("before", unplaced=True)

    def options_after(self, before: MeasuredRun) -> Options:
        """The run after is on the CPUs of the run before."""
        fields: dict[str, Any] = {}
        if latency := (before.guest or before).latency:
            fields["cpus"] = latency.settings.cpus
        if before.throughput:
            sides = before.throughput.settings
            fields["loop_cpus"] = f"{sides.host_cpu},{sides.guest_cpu}"
        return self._options("after", **fields)

    def _options(self, when: str, **fields: Any) -> Options:
        given = self.options.model_dump()
        return valid(Options, {**given, "label": f"{self.options.label}-{when}", **fields})

    def keep(self, folder: Path) -> None:
        """Raises: HostError."""
        result.write_text(folder / STATE, self.model_dump_json(indent=1) + "\n")

    def check(self, given: Mapping[str, Any], intent: HostIntent | None) -> None:
        """Check that a later call asks for the same; what it leaves away is as before. Raises: Conflict."""
        asked = valid(Options, {**self.options.model_dump(), **given})
        for name in given:
            old, new = getattr(self.options, name), getattr(asked, name)
            if old != new:
                had = "none" if old is None else old
                raise Conflict(f"{name}: {new}, and what was begun has {had}", step=STEP, fix=_DISCARD)
        if intent is not None and intent != self.intent:
            raise Conflict("the plan is another than what was begun with", step=STEP, fix=_DISCARD)


def kept(folder: Path) -> EffectState | None:
    """Return the state of an effect that is not measured yet; None if there is none. Raises: HostError."""
    path = folder / STATE
    try:
        return EffectState.model_validate_json(read_own(path))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, ValidationError) as wrong:
        raise HostError(f"{path} cannot be read", step=STEP, fix="begin again: --discard") from wrong

"""Measure the effect of ``host apply``: before, apply, a reboot if it needs one, after; kept between calls.

Each call goes on where the last one ended. Applying is repeated by each call until nothing is left for a
reboot or a restart of OVS: it changes only what is not as planned, and a reboot resets some of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import ValidationError

from netplugin.api.errors import Conflict, HostError
from netplugin.api.field_errors import valid
from netplugin.host.safe_files import read_own
from netplugin.tuning.applying.apply import BAD, Result, StepOutcome
from netplugin.tuning.intent import HostIntent
from netplugin.tuning.verifying import result
from netplugin.tuning.verifying.comparison import MeasurementComparison, compare
from netplugin.tuning.verifying.options import Options
from netplugin.tuning.verifying.result import MeasuredRun, StoredMeasurement

STEP = "effect"
#: File of the state, next to the runs, while the effect is not measured yet.
STATE = "effect.state"
_LATER = (StepOutcome.NEEDS_REBOOT, StepOutcome.NEEDS_OVS_RESTART)
_DISCARD = "give the same, or begin again: --discard"


class EffectState(StoredMeasurement):
    """``before``: file name of the run before, None until it is measured."""

    format: Literal[1] = 1
    options: Options
    intent: HostIntent
    before: str | None = None


class EffectHost(Protocol):
    """What is done to this host."""

    def measure(self, options: Options, intent: HostIntent) -> tuple[Path, MeasuredRun]:
        """Measure and keep the run. Raises: NetpluginError."""

    def apply(self, intent: HostIntent) -> Sequence[Result]:
        """Apply the plan of this intent, as far as a running host can. Raises: NetpluginError."""


@dataclass(frozen=True)
class Waiting:
    """Steps that a reboot or a restart of OVS must bring into effect before the rest is measured."""

    left: tuple[Result, ...]


def carry_on(
    host: EffectHost, folder: Path, state: EffectState, go_on: bool
) -> MeasurementComparison | Waiting:
    """Do what is next, and all after it that needs no reboot. ``go_on``: measure without the reboot.

    Raises: NetpluginError; HostError if a step was refused. The state is kept then.
    """
    _options_of(state, "before")  # its label is checked before anything is kept
    keep(folder, state)
    if state.before is None:
        path, _ = host.measure(_options_of(state, "before"), state.intent)
        state = state.model_copy(update={"before": path.name})
        keep(folder, state)
    assert state.before is not None
    before = result.read(folder / state.before)
    results = host.apply(state.intent)
    refused = [str(each.target) for each in results if each.outcome in BAD]
    if refused:
        raise HostError(
            f"not set: {', '.join(refused)}",
            step=STEP,
            fix="mend what the reasons above name, and call this again; or undo: netplugin host apply --undo",
        )
    left = tuple(each for each in results if each.outcome in _LATER)
    if left and not go_on:
        return Waiting(left)
    _, after = host.measure(_after(state, before), state.intent)
    (folder / STATE).unlink(missing_ok=True)
    return compare(before, after)


def _options_of(state: EffectState, when: str, **fields: Any) -> Options:
    """The options of one of the two runs; the VM before is as one on a host without a plan.

    Raises: InvalidRequest for a label that is too long.
    """
    given = state.options.model_dump() | {"label": f"{state.options.label}-{when}"} | fields
    return valid(Options, given | ({"unplaced": True} if when == "before" else {}))


def _after(state: EffectState, before: MeasuredRun) -> Options:
    """The options of the run after: on the CPUs of the run before."""
    latency = before.guest_latency or before.latency
    fields: dict[str, Any] = {"cpus": latency.settings.cpus} if latency else {}
    if before.throughput:
        sides = before.throughput.settings
        fields["loop_cpus"] = f"{sides.host_cpu},{sides.guest_cpu}"
    return _options_of(state, "after", **fields)


def keep(folder: Path, state: EffectState) -> None:
    """Raises: HostError."""
    result.write_text(folder / STATE, state.model_dump_json(indent=1) + "\n")


def kept(folder: Path) -> EffectState | None:
    """Return the state of an effect that is not measured yet; None if there is none. Raises: HostError."""
    path = folder / STATE
    try:
        return EffectState.model_validate_json(read_own(path))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, ValidationError) as wrong:
        raise HostError(f"{path} cannot be read", step=STEP, fix="begin again: --discard") from wrong


def same(state: EffectState, given: Mapping[str, Any], intent: HostIntent | None) -> None:
    """Check that a later call asks for the same; what it leaves away is as before. Raises: Conflict."""
    asked = state.options.model_copy(update=dict(Options.model_validate(dict(given))))
    for name in given:
        old, new = getattr(state.options, name), getattr(asked, name)
        if old != new:
            raise Conflict(
                f"{name}: {new}, and what was begun has {'none' if old is None else old}",
                step=STEP,
                fix=_DISCARD,
            )
    if intent is not None and intent != state.intent:
        raise Conflict("the plan is another than what was begun with", step=STEP, fix=_DISCARD)

"""The generator ``exec``: any program that speaks JSON lines, as docs/zeroloss/generators.md has them."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, TypeAdapter

from netplugin_zeroloss.generators.contract import (
    LATE_PART,
    Generator,
    GeneratorDescription,
    GeneratorInfo,
    Positive,
)
from netplugin_zeroloss.generators.dialogue import Answer, Dialogue
from netplugin_zeroloss.values import Measurement, TrialRequest, UnusableInput

_MEASUREMENT: Final = TypeAdapter(Measurement)


class Exec(GeneratorDescription):
    """A program that speaks JSON lines. The command is quoted as in a shell; no shell is started."""

    type: Literal["exec"] = "exec"
    command: str
    #: Seconds allowed for an answer, in addition to the trial duration.
    answer_timeout_s: Positive = 60.0


def _whole(value: Any) -> Any:
    """Round floats: programs may send 4200000.0, or the product of a rate and a time."""
    return round(value) if isinstance(value, float) and math.isfinite(value) else value


_Count = Annotated[int, BeforeValidator(_whole)]
_NotNegative = Annotated[float, Field(ge=0)]


class _Hello(Answer):
    ok: bool
    name: str = "exec"
    max_pps: Annotated[float, Field(gt=0)] | None = None
    virtual_time: bool = False
    can_abort: bool = True
    min_trial_s: Annotated[float, Field(ge=0, le=86_400)] = 0.0
    latency: bool = False
    bursts: bool = False
    bursts_of_mixes: bool | None = None
    line_bps: Annotated[float, Field(gt=0)] | None = None


class _Pair(Answer):
    tx_packets: _Count
    rx_packets: _Count


class _Reading(_Pair):
    elapsed_s: _NotNegative


class _Latency(Answer):
    samples: Annotated[_Count, Field(ge=0)]
    p50_us: _NotNegative
    p90_us: _NotNegative
    p99_us: _NotNegative
    max_us: _NotNegative


class _Answer(_Pair):
    """Result of a trial. Negative counters are accepted here: the trial is then judged invalid."""

    elapsed_s: float
    aborted: bool = False
    tx_shortfall: _Count = 0
    rx_errors: _Count = 0
    queue_drops: _Count = 0
    queue_full: _Count = 0
    in_flight_packets: _Count = 0
    elapsed_uncertainty_s: float = 0.0
    settled: bool = True
    directions: tuple[_Pair, ...] = ()
    latencies: tuple[_Latency, ...] = ()
    progress: tuple[_Reading, ...] = ()
    evidence: dict[str, float] = Field(default_factory=dict)
    readings: dict[str, float] = Field(default_factory=dict)


class ExecGenerator(Generator):
    """A program that speaks JSON lines. ``answer_s``: seconds allowed per answer beyond the trial."""

    def __init__(
        self,
        command: str | Sequence[str],
        answer_s: float = 60.0,
        who: str = "--exec-cmd",
        opened: ExitStack | None = None,
    ) -> None:
        """Start the program and read its ``hello``; ``opened`` is closed after it.

        Raises: UnusableInput, GeneratorError.
        """
        self._answer_s = answer_s
        arguments = _arguments(command) if isinstance(command, str) else command
        with opened or ExitStack() as parts:
            self._dialogue = parts.enter_context(closing(Dialogue(who, arguments)))
            hello = self._dialogue.ask({"op": "hello", "version": 1}, answer_s, _Hello)
            if not hello.ok:
                raise self._dialogue.error("it does not want to start: its hello says ok: false")
            self._opened = parts.pop_all()
        about = hello.model_dump(exclude={"ok"}, exclude_none=True)
        self._info = GeneratorInfo(**{"bursts_of_mixes": hello.bursts} | about)

    def run(self, request: TrialRequest) -> Measurement:
        question: dict[str, Any] = {"op": "trial"}
        for name in ("rate_pps", "duration_s", "frame_size", "flows", "abort_on_loss"):
            question[name] = getattr(request, name)
        optional = {"mix": request.mix, "latency": request.latency, "readings": request.readings}
        question |= {name: value for name, value in optional.items() if value}
        if request.burst > 1:
            question["burst"] = request.burst
        takes = 0.0 if self._info.virtual_time else request.duration_s * (1 + LATE_PART)
        answer = self._dialogue.ask(question, takes + self._answer_s, _Answer)
        return _MEASUREMENT.validate_python(answer.model_dump())


def _arguments(command: str) -> list[str]:
    try:
        arguments = shlex.split(command)
    except ValueError as error:
        raise UnusableInput("--exec-cmd", f"its quotes are not closed: {command!r}") from error
    if not arguments:
        raise UnusableInput("--exec-cmd", "it is empty")
    return arguments

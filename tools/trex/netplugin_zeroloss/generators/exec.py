"""The generator ``exec``: any program that speaks JSON lines on standard input and output.

The program is started once, from an argument list. Requests and answers are one object per line:

    -> {"op":"hello","version":1}
    <- {"ok":true,"name":"mine","max_pps":14880000.0,"virtual_time":false}
    -> {"op":"trial","rate_pps":..,"duration_s":..,"frame_size":64,"flows":1024,"abort_on_loss":true}
    <- {"tx_packets":..,"rx_packets":..,"elapsed_s":..}
    -> {"op":"bye"}

Standard error is kept for the error message.
"""

from __future__ import annotations

import math
import shlex
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from netplugin_zeroloss.generators.contract import Generator, GeneratorInfo
from netplugin_zeroloss.generators.dialogue import Dialogue
from netplugin_zeroloss.values import (
    Direction,
    LatencySummary,
    Measurement,
    Progress,
    TrialRequest,
    UnusableInput,
)

_MODEL = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


def _whole(value: Any) -> Any:
    """Round floats: programs may send 4200000.0, or the product of a rate and a time."""
    return round(value) if isinstance(value, float) and math.isfinite(value) else value


Count = Annotated[int, BeforeValidator(_whole)]


class _Hello(BaseModel):
    model_config = _MODEL

    ok: bool
    name: str = "exec"
    max_pps: Annotated[float, Field(gt=0)] | None = None
    virtual_time: bool = False
    can_abort: bool = True
    min_trial_s: Annotated[float, Field(ge=0, le=86_400)] = 0.0
    latency: bool = False
    bursts: bool = False


class _Pair(BaseModel):
    model_config = _MODEL

    tx_packets: Count
    rx_packets: Count


class _Reading(_Pair):
    elapsed_s: Annotated[float, Field(ge=0)]


class _Latency(BaseModel):
    model_config = _MODEL

    samples: Annotated[Count, Field(ge=0)]
    p50_us: Annotated[float, Field(ge=0)]
    p90_us: Annotated[float, Field(ge=0)]
    p99_us: Annotated[float, Field(ge=0)]
    max_us: Annotated[float, Field(ge=0)]


class _Answer(_Pair):
    """Result of a trial. Negative counters are accepted here: the trial is then judged invalid."""

    elapsed_s: float
    aborted: bool = False
    tx_shortfall: Count = 0
    rx_errors: Count = 0
    queue_drops: Count = 0
    queue_full: Count = 0
    in_flight_packets: Count = 0
    elapsed_uncertainty_s: float = 0.0
    settled: bool = True
    directions: tuple[_Pair, ...] = ()
    latencies: tuple[_Latency, ...] = ()
    progress: tuple[_Reading, ...] = ()
    evidence: dict[str, float] = {}


class ExecGenerator(Generator):
    """A user-supplied program. ``answer_s``: seconds allowed per answer beyond the trial duration."""

    def __init__(self, command: str, answer_s: float = 60.0) -> None:
        """Start the program and read its ``hello``. Raises: UnusableInput, GeneratorError."""
        self._answer_s = answer_s
        self._dialogue = Dialogue("--exec-cmd", _arguments(command))
        try:
            hello = self._dialogue.ask({"op": "hello", "version": 1}, answer_s, _Hello)
            if not hello.ok:
                raise self._dialogue.error("it does not want to start: its hello says ok: false")
        except BaseException:
            self.close()
            raise
        self._info = GeneratorInfo(
            hello.name,
            hello.max_pps or math.inf,
            hello.virtual_time,
            hello.can_abort,
            hello.min_trial_s,
            latency=hello.latency,
            bursts=hello.bursts,
            bursts_of_mixes=hello.bursts,
        )

    @property
    def info(self) -> GeneratorInfo:
        return self._info

    def run(self, request: TrialRequest) -> Measurement:
        question: dict[str, Any] = {
            "op": "trial",
            "rate_pps": request.rate_pps,
            "duration_s": request.duration_s,
            "frame_size": request.frame_size,
            "flows": request.flows,
            "abort_on_loss": request.abort_on_loss,
        }
        optional = {"mix": request.mix, "latency": request.latency, "readings": request.readings}
        question |= {name: value for name, value in optional.items() if value}
        if request.burst > 1:
            question["burst"] = request.burst
        takes = 0.0 if self._info.virtual_time else request.duration_s
        answer = self._dialogue.ask(question, takes + self._answer_s, _Answer)
        return Measurement(
            **{
                **dict(answer),
                "directions": tuple(Direction(**dict(pair)) for pair in answer.directions),
                "latencies": tuple(LatencySummary(**dict(one)) for one in answer.latencies),
                "progress": tuple(Progress(**dict(reading)) for reading in answer.progress),
            }
        )

    def close(self) -> None:
        self._dialogue.close()


def _arguments(command: str) -> list[str]:
    try:
        arguments = shlex.split(command)
    except ValueError as error:
        raise UnusableInput("--exec-cmd", f"its quotes are not closed: {command!r}") from error
    if not arguments:
        raise UnusableInput("--exec-cmd", "it is empty")
    return arguments

"""Models of recorded results: what a journal, or a file of ``search --json``, must have to be read.

A result stays what it is in JSON, so that it is shown and written again as it was recorded; fields of later
versions are kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NotRequired

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter, with_config
from typing_extensions import TypedDict

from netplugin.programs import bounded
from netplugin_zeroloss.judge import Verdict
from netplugin_zeroloss.search.trials import SearchPlan, SearchVerdict
from netplugin_zeroloss.values import MIXES, Measurement, TrialRequest, UnusableInput

_MOST_PPS, _MOST_S = 1e15, 1e6


def _finite(value: Any) -> Any:
    """JSON has no infinity: a generator without a maximum rate."""
    if isinstance(value, dict) and value.get("generator_max_pps", 0) is None:
        return value | {"generator_max_pps": math.inf}
    return value


def _numbers(value: Any) -> Any:
    """JSON has no NaN."""
    return {k: math.nan if v is None else v for k, v in value.items()} if isinstance(value, dict) else value


def _as_value(plan: PlanEntry) -> PlanEntry:
    """Check that the plan is one. Raises: ValueError, which pydantic expects."""
    try:
        bounded.validated(plan, _PLAN)
    except UnusableInput as error:
        raise ValueError(str(error)) from error
    return plan


def _sendable(request: TrialRequest) -> TrialRequest:
    """Check that a generator could have been given this request. Raises: ValueError."""
    if not (0 < request.rate_pps <= _MOST_PPS and 0 < request.duration_s <= _MOST_S):
        raise ValueError(f"{request.rate_pps:g} pps for {request.duration_s:g} s is no trial")
    if request.mix not in ("", *MIXES) or min(request.frame_size, request.flows, request.burst) < 1:
        raise ValueError("no generator sends such frames")
    return request


#: Values that are read to continue or replay a search.
Plan = Annotated[SearchPlan, BeforeValidator(_finite)]
Requested = Annotated[TrialRequest, AfterValidator(_sendable)]
Measured = Annotated[Measurement, BeforeValidator(_numbers)]


@dataclass(frozen=True, slots=True)
class PastTrial:
    """One finished trial. ``wall_s``: real seconds since the previous trial or the setup."""

    repeat: Annotated[int, Field(ge=0, le=1000)]
    request: Requested
    measured: Measured
    wall_s: float


_PLAN: TypeAdapter[SearchPlan] = TypeAdapter(Plan)

#: For a whole record; the models in it inherit it.
_KEPT = with_config(ConfigDict(extra="allow"))
Count = Annotated[int, Field(ge=0)]
Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
Seconds = Annotated[float, Field(ge=0)]
Rate = Annotated[float, Field(ge=0, le=_MOST_PPS)]
_Repeats = Annotated[int, Field(ge=0, le=1000)]


def _ordered(pair: list[float]) -> list[float]:
    if pair[0] > pair[1]:
        raise ValueError("the lower one is above the upper one")
    return pair


Bounds = Annotated[list[Rate], Field(min_length=2, max_length=2), AfterValidator(_ordered)]


class PlanEntry(TypedDict):
    line_rate_pps: Rate
    buffer_packets: Count


class GoalEntry(TypedDict):
    name: str
    in_words: str
    initial_trial_s: Annotated[float, Field(gt=0)]
    relative_width: Annotated[float, Field(ge=1e-9, le=0.5)]


class StandardEntry(TypedDict):
    """The goal result of RFC 9971."""

    regular: bool
    relevant_lower_bound_pps: Rate | None
    relevant_upper_bound_pps: Rate | None
    conditional_throughput_pps: Rate | None


class GoalResult(TypedDict):
    goal: GoalEntry
    verdict: SearchVerdict
    reason: str
    rate_pps: Rate | None
    #: Earlier versions had none.
    rfc9971: NotRequired[StandardEntry]


class SpreadEntry(TypedDict):
    answers: Count
    median_pps: Rate
    interval_pps: Bounds
    confidence: Annotated[float, Field(ge=0, le=1)]


class RepeatsEntry(TypedDict):
    count: Annotated[int, Field(ge=1, le=1000)]
    shown: Count
    verdicts: dict[str, _Repeats]
    answers_pps: Annotated[list[Rate | None], Field(max_length=1000)]
    spread: SpreadEntry | None


class MeasuredEntry(TypedDict):
    tx_packets: int
    rx_packets: int
    rx_errors: int
    elapsed_s: Number
    evidence: dict[str, float]
    readings: NotRequired[dict[str, float | None]]


class TrialEntry(TypedDict):
    repeat: _Repeats
    number: Count
    rate_pps: Annotated[float, Field(gt=0, le=_MOST_PPS)]
    duration_s: Annotated[float, Field(gt=0)]
    purpose: str
    verdict: Verdict
    reason: str
    lost_packets: int
    measured: MeasuredEntry


class FloorEntry(TypedDict):
    loss_ratio: Annotated[float, Field(ge=0, le=1)]
    place: str | None


class AttributionEntry(TypedDict):
    lower_trials: list[int]
    upper_trials: list[int]
    lost_at_upper: int
    places_at_upper: dict[str, float]
    floor: FloorEntry | None
    invalid_causes: dict[str, int]
    #: Earlier versions had none.
    lost_by_direction: NotRequired[list[int]]
    dead_directions: NotRequired[Sequence[Count]]
    limiting_directions: NotRequired[Sequence[Count]]
    full: NotRequired[dict[str, float]]


class LoadEntry(TypedDict):
    part: Annotated[float, Field(gt=0, le=1)]
    rate_pps: Rate
    verdict: Verdict
    samples: Count
    p50_us: float | None
    p90_us: float | None
    p99_us: float | None
    max_us: float | None


def _measured(load: LoadEntry) -> LoadEntry:
    if load["samples"] and None in (load["p50_us"], load["p90_us"], load["p99_us"], load["max_us"]):
        raise ValueError("it has samples and no latency")
    return load


class LatencyEntry(TypedDict):
    reason: str
    loads: list[Annotated[LoadEntry, AfterValidator(_measured)]]


class ReadingEntry(TypedDict):
    elapsed_s: Seconds
    missing_packets: int


class SoakEntry(TypedDict):
    """Without a verdict there was no rate to hold, and nothing else was recorded."""

    verdict: Verdict | None
    reason: str
    readings: list[ReadingEntry]
    rate_pps: NotRequired[Rate]
    elapsed_s: NotRequired[Seconds]
    lost_packets: NotRequired[int]
    loss_ratio: NotRequired[float]


def _held(soak: SoakEntry) -> SoakEntry:
    needed = {"rate_pps", "elapsed_s", "lost_packets", "loss_ratio"}
    if soak["verdict"] is not None and (missing := needed - soak.keys()):
        raise ValueError(f"{min(missing)} is missing")
    return soak


@_KEPT
class ResultEntry(TypedDict):
    """The output of ``search --json``."""

    verdict: SearchVerdict
    reason: str
    zero_loss_pps: Annotated[float, Field(ge=0.01, le=_MOST_PPS)] | None
    bounds_pps: Bounds
    trials: Count
    invalid_trials: Count
    traffic_s: Seconds
    wall_s: Seconds
    goal: GoalEntry
    goals: Annotated[list[GoalResult], Field(min_length=1)]
    repeats: RepeatsEntry
    plan: Annotated[PlanEntry, AfterValidator(_as_value)]
    trial_log: list[TrialEntry]
    evidence: AttributionEntry
    environment: dict[str, Any]
    #: Earlier versions had none.
    latency: NotRequired[LatencyEntry | None]
    soak: NotRequired[Annotated[SoakEntry, AfterValidator(_held)] | None]


def _pair(entry: Any) -> Any:
    """Take the request out of an entry of a log, whose fields are those of the entry, and its measurement."""
    return (entry, entry.get("measured")) if isinstance(entry, dict) else entry


RecordedLog = list[Annotated[tuple[Requested, Measured], BeforeValidator(_pair)]]


class Recorded(TypedDict):
    """What is replayed of a result: its plan, and the trials of each repeat and of what followed."""

    plan: Plan
    trial_log: RecordedLog
    #: Earlier versions had none.
    follow_up_log: NotRequired[RecordedLog]


class SpecEntry(TypedDict):
    queues: Count


class PortEntry(TypedDict):
    spec: SpecEntry


@_KEPT
class SetupEntry(TypedDict):
    """The setup of a cell: bindings, PMD cores with their CPUs, VNF with version and configuration."""

    ports: NotRequired[list[PortEntry]]
    ends: NotRequired[list[str]]


@_KEPT
class RunEnvironment(TypedDict):
    """Machine and versions of a run, and what a resumed run restores."""

    run_id: NotRequired[Annotated[str, Field(pattern=r"^[0-9A-Za-z-]{1,64}$")]]
    pmd_cpus: NotRequired[str | None]
    pmd_mask: NotRequired[bool | None]
    nics: NotRequired[dict[str, dict[str, Any]] | None]
    #: Of the resumed run, as it is read: their environments.
    sessions: NotRequired[list[dict[str, Any]]]

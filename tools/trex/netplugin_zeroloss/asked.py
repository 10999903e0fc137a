"""What is requested of a search, for ``search`` and for each cell of ``matrix``: its options and its plan."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from netplugin.api.field_errors import message
from netplugin_zeroloss.generators.contract import GeneratorInfo
from netplugin_zeroloss.search.recorded import PastTrial
from netplugin_zeroloss.search.trials import SearchPlan
from netplugin_zeroloss.values import OTHER_GOALS, Goal, headline, line_rate_pps, mean_size

#: Line rate in bit/s if neither the ports of the generator nor a description gives one.
BITS_PER_SECOND = 10e9


def _named(name: str) -> str:
    if name not in OTHER_GOALS:
        raise ValueError(f"no {name!r}; there are {', '.join(OTHER_GOALS)}")
    return name


GoalName = Annotated[str, AfterValidator(_named)]


def _number(most: float, gt: float | None = None, ge: float | None = None) -> Any:
    return Field(le=most, gt=gt, ge=ge, allow_inf_nan=False)


class SearchOptions(BaseModel):
    """Parameters of a search. The text below each begins with what stands for its value in the help."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    line_rate_pps: Annotated[float, _number(1e12, gt=0)] | None = None
    """PPS: line rate in frames per second, all directions together: the maximum load (default: 10 Gbit/s, or
    the speed of the generator's ports, at the frame size)"""
    precision: Annotated[float, _number(0.5, gt=0)] = 0.005
    """RATIO: relative width of the result: upper <= lower * (1 + RATIO)"""
    final_duration: Annotated[float, _number(86_400, gt=0)] = 60.0
    """S: duration in seconds of the deciding trial"""
    initial_duration: Annotated[float, _number(3600, gt=0)] = 0.4
    """S: duration in seconds of the first, short trials"""
    max_loss_ratio: Annotated[float, _number(0.5, ge=0)] = 0.0
    """RATIO: allowed loss ratio"""
    #: Goal of a standard, instead of ``final_duration`` and ``max_loss_ratio``; and additional goals.
    preset: GoalName | None = None
    goals: tuple[GoalName, ...] = ()
    #: Search without the extensions to RFC 9971, such as early abort.
    strict_rfc9971: bool = False
    warm_up: Annotated[float, _number(3600, ge=0)] | None = None
    """S: warm-up: loss within the first S seconds of traffic does not count (default: a sixth of the
    deciding trial)"""
    buffer_packets: Annotated[int, Field(ge=0, le=10**9)] = 2048
    """N: frames that rings and queues on the path can hold"""
    max_trials: Annotated[int, Field(ge=1, le=100_000)] = 150
    """N: maximum number of trials"""
    repeats: Annotated[int, Field(ge=1, le=1000)] = 1
    """N: number of searches; reports the median with a confidence interval"""
    latency_duration: Annotated[float, _number(3600, ge=0)] = 0.0
    """S: then measure the latency at 10, 50 and 90 % of the found rate, for S seconds each; 0: not at all"""
    soak_duration: Annotated[float, _number(604_800, ge=0)] = 0.0
    """S: then hold the found rate for S seconds and report what is lost when; 0: not at all"""

    @model_validator(mode="after")
    def _one_goal(self) -> Self:
        """A preset has durations and a loss ratio of its own: others would be ignored."""
        of_goal = {"final_duration", "initial_duration", "max_loss_ratio"}
        if self.preset and (other := self.model_fields_set & of_goal):
            raise ValueError(f"leave out {' and '.join(sorted(other))}, which the preset {self.preset} has")
        return self

    @property
    def headline(self) -> Goal:
        """The main goal: that of the preset, or of the other fields."""
        if self.preset:
            return OTHER_GOALS[self.preset](self.precision)
        return headline(self.final_duration, self.initial_duration, self.precision, self.max_loss_ratio)

    def plan(
        self, info: GeneratorInfo, frame: int | str, flows: int, burst: int, line_bps: float, **more: Any
    ) -> SearchPlan:
        """Return the plan of a search. ``frame``: bytes with FCS, or a mix; ``more``: its other fields."""
        mix = frame if isinstance(frame, str) else ""
        size = mean_size(mix) if mix else float(frame)
        first = self.headline
        fields: dict[str, Any] = {
            "goals": (first, *(OTHER_GOALS[name](self.precision) for name in self.goals)),
            "line_rate_pps": self.line_rate_pps or line_rate_pps(line_bps, size),
            "generator_max_pps": info.limit_pps(size),
            "can_abort": info.can_abort,
            "min_trial_s": info.min_trial_s,
            "measures_latency": info.latency,
            **{"frame_size": round(size), "flows": flows, "mix": mix, "burst": burst},
            "warm_up_s": first.final_trial_s / 6 if self.warm_up is None else self.warm_up,
            "strict_rfc9971": self.strict_rfc9971,
            "buffer_packets": self.buffer_packets,
            "max_trials": self.max_trials,
            **{"latency_s": self.latency_duration, "soak_s": self.soak_duration},
        }
        return SearchPlan(**(fields | more))


def add_fields(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add options for these parameters, with their bounds."""
    for name in names:
        field = SearchOptions.model_fields[name]
        unit, _, what = " ".join((field.description or "").split()).partition(": ")
        if "(default" not in what:
            what += f" (default: {field.default:g})"
        flag, what = f"--{name.replace('_', '-')}", what.replace("%", "%%")
        parser.add_argument(flag, type=_parser(name), default=field.default, metavar=unit, help=what)


def _parser(name: str) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return getattr(SearchOptions.model_validate({name: text}), name)
        except ValidationError as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {message(error.errors()[0])}") from None

    return parse


def trial_line(plan: SearchPlan, number: int, trial: PastTrial) -> str:
    """Format one trial, judged by the headline goal; ``number``: within its repeat."""
    request, judged = trial.request, plan.judge(trial.request, trial.measured)
    return (
        f"trial {trial.repeat + 1}.{number}  {_pps(request.rate_pps):>12}  {trial.measured.elapsed_s:7.2f} of"
        f" {request.duration_s:g} s  {judged.verdict:7}  {request.purpose}: {judged.reason}"
    )


def _pps(rate: float) -> str:
    """Format a rate such as ``4.2 Mpps``, with enough digits for a precision of 0.1 %."""
    for unit, size in (("Mpps", 1e6), ("kpps", 1e3)):
        if rate >= size:
            return f"{rate / size:.5g} {unit}"
    return f"{rate:.5g} pps"

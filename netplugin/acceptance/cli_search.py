"""The sub-commands ``search``, one search with one generator, and ``replay``, the same from its result."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from netplugin.acceptance import result as results
from netplugin.acceptance.cli_generator import add_generator, description_of
from netplugin.acceptance.cli_options import add_goal, number, whole
from netplugin.acceptance.errors import ReplayError, UnusableInput
from netplugin.acceptance.generators.choose import make
from netplugin.acceptance.generators.contract import GeneratorInfo
from netplugin.acceptance.goals import OTHER_GOALS, headline, warm_up_s
from netplugin.acceptance.judge import judge
from netplugin.acceptance.run import Run, run_search
from netplugin.acceptance.search import replay
from netplugin.acceptance.trials import SearchPlan
from netplugin.acceptance.values import (
    MIXES,
    Measurement,
    TrialRequest,
    line_rate_pps,
    mean_size,
)

#: The line if nothing is said of it.
_BITS_PER_SECOND = 10e9


def add_search(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "search",
        help="one search with one generator",
        description="Find the highest rate without loss. The result is on standard output, progress"
        " on standard error.",
    )
    parser.set_defaults(command=_search)
    add_generator(parser)
    add_goal(parser)
    parser.add_argument(
        "--max-loss-ratio", type=number(0, 0.5, inclusive=True), default=0.0, metavar="RATIO",
        help="loss that is allowed (default: none)",
    )  # fmt: skip
    parser.add_argument(
        "--goal", action="append", choices=tuple(OTHER_GOALS), default=[], dest="goals",
        help="measure this beside the headline; may be given again",
    )  # fmt: skip
    parser.add_argument(
        "--warm-up", type=number(0, 3600, inclusive=True), metavar="S",
        help="loss in so many first seconds of traffic is not held against the device"
        " (default: a sixth of --final-duration)",
    )  # fmt: skip
    parser.add_argument(
        "--buffer-packets", type=whole(0, 10**9), default=2048, metavar="N",
        help="frames that the rings on the way may hold (default: %(default)s)",
    )  # fmt: skip
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument(
        "--frame-size", type=whole(64, 16_000), default=64, metavar="BYTES",
        help="with the frame check sequence (default: %(default)s)",
    )  # fmt: skip
    sizes.add_argument(
        "--mix", choices=tuple(MIXES), default="", help="a mix of sizes instead of one"
    )
    parser.add_argument("--flows", type=whole(1, 10**9), default=1024, metavar="N")
    parser.add_argument(
        "--vnf-ceiling-pps", type=number(0, 1e12), metavar="PPS",
        help="what the VNF does without the backend, from a control run",
    )  # fmt: skip
    parser.add_argument(
        "--max-trials", type=whole(1, 100_000), default=150, metavar="N",
        help="give up after so many trials (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--repeats", type=whole(1, 1000), default=1, metavar="N",
        help="search so many times, and report the median with an interval",
    )  # fmt: skip
    parser.add_argument(
        "--seed", type=whole(0, 2**63), default=1, metavar="N",
        help="of everything random: the simulated device (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--json", metavar="FILE", help="write the whole result (- : standard output)"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress")


def _search(options: argparse.Namespace) -> int:
    description = description_of(options)
    plan = _plan(options)
    _check_writable(options.json)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    with make(description) as generator:
        plan = _with_generator(plan, generator.info, options.line_rate_pps)
        runs = []
        for repeat in range(options.repeats):
            watch = None if options.quiet else _Progress(plan, repeat, options.repeats)
            runs.append(run_search(plan, generator, watch))
        where = results.environment(generator.info.name, sys.argv, started)
    result = results.result_of(plan, runs, where | {"seed": options.seed})
    _report(result, options.json)
    return 1 if result["verdict"] == "failed" else 0


def _plan(options: argparse.Namespace) -> SearchPlan:
    """Raises: UnusableInput, before anything was sent."""
    final = options.final_duration
    first = headline(final, options.initial_duration, options.precision, options.max_loss_ratio)
    return SearchPlan(
        goals=(first, *(OTHER_GOALS[name](options.precision) for name in options.goals)),
        line_rate_pps=options.line_rate_pps or line_rate_pps(_BITS_PER_SECOND, options.frame_size),
        frame_size=round(mean_size(options.mix)) if options.mix else options.frame_size,
        flows=options.flows,
        mix=options.mix,
        warm_up_s=warm_up_s(options.warm_up, final),
        buffer_packets=options.buffer_packets,
        max_trials=options.max_trials,
        vnf_ceiling_pps=options.vnf_ceiling_pps,
    )


def _with_generator(plan: SearchPlan, info: GeneratorInfo, line_pps: float | None) -> SearchPlan:
    """The line is that of the generator's ports unless ``line_pps`` says otherwise."""
    size = mean_size(plan.mix) if plan.mix else plan.frame_size
    line_bps = info.line_bps if math.isfinite(info.line_bps) else _BITS_PER_SECOND
    return replace(
        plan,
        line_rate_pps=line_pps or line_rate_pps(line_bps, size),
        generator_max_pps=info.limit_pps(size),
        can_abort=info.can_abort,
        min_trial_s=info.min_trial_s,
    )


def _check_writable(name: str | None) -> None:
    """Not after an hour of traffic. Raises: UnusableInput."""
    if name is None or name == "-":
        return
    directory = Path(name).resolve().parent
    if not directory.is_dir() or Path(name).is_dir():
        raise UnusableInput(
            "--json", f"{name} cannot be written: is it in a directory that exists?"
        )


# -- what is printed -----------------------------------------------------------------------------


class _Progress:
    """A line on standard error for each trial."""

    def __init__(self, plan: SearchPlan, repeat: int, repeats: int) -> None:
        self._goal = plan.headline
        self._prefix = f"{repeat + 1}/{repeats} " if repeats > 1 else ""
        self._number = 0
        self._traffic_s = 0.0

    def __call__(self, request: TrialRequest, measured: Measurement) -> None:
        self._number += 1
        self._traffic_s += max(0.0, measured.elapsed_s)
        verdict = judge(request, measured, self._goal.relative_width, self._goal.max_loss_ratio)
        print(
            f"{self._prefix}trial {self._number:3d}  {pps(request.rate_pps):>12}"
            f"  {measured.elapsed_s:7.2f} of {request.duration_s:g} s  {verdict.verdict:7}"
            f"  {request.purpose}: {verdict.reason}",
            file=sys.stderr,
            flush=True,
        )


def pps(rate: float) -> str:
    """``4.2 Mpps``, with as many digits as a precision of 0.1 % needs."""
    for unit, size in (("Mpps", 1e6), ("kpps", 1e3)):
        if rate >= size:
            return f"{rate / size:.5g} {unit}"
    return f"{rate:.5g} pps"


def summary(result: Mapping[str, Any]) -> str:
    """The few lines a person reads; the goal stands beside every number."""
    lower, upper = result["bounds_pps"]
    lines = [f"verdict    {result['verdict']}: {result['reason']}"]
    for name, rate, words in results.goals_of(result):
        lines.append(f"{name:10} {pps(rate) if rate is not None else 'no rate'}  ({words})")
    lines.append(f"bounds     {pps(lower)} to {pps(upper)}")
    floor = result["evidence"]["floor"]
    if floor:
        lines.append(
            f"floor      {floor['loss_ratio']:.3g} of the frames, at {floor['place'] or '?'}"
        )
    lines += _repeat_lines(result["repeats"])
    lines.append(
        f"cost       {result['trials']} trials ({result['invalid_trials']} invalid),"
        f" {result['traffic_s']:.1f} s of traffic, {result['wall_s']:.1f} s in all"
    )
    return "".join(f"{line}\n" for line in lines)


def _repeat_lines(repeats: Mapping[str, Any]) -> Sequence[str]:
    if repeats["count"] == 1:
        return []
    counts = ", ".join(f"{count} {name}" for name, count in repeats["verdicts"].items())
    lines = [f"repeats    {repeats['count']}: {counts}"]
    if repeats["spread"]:
        found = repeats["spread"]
        low, high = found["interval_pps"]
        lines.append(
            f"median     {pps(found['median_pps'])}, from {pps(low)} to {pps(high)} with"
            f" {found['confidence']:.1%} confidence"
        )
    return lines


def _report(result: Mapping[str, Any], name: str | None) -> None:
    if name == "-":
        sys.stdout.write(results.dumps(result))
        return
    sys.stdout.write(summary(result))
    if name is not None:
        try:
            Path(name).write_text(results.dumps(result), encoding="utf-8")
        except OSError as error:
            raise UnusableInput("--json", f"{name}: {error.strerror}") from error


# -- replay --------------------------------------------------------------------------------------


def add_replay(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "replay",
        help="search again in the trials of a result: the answer must be the same",
    )
    parser.set_defaults(command=_replay)
    parser.add_argument("file", metavar="FILE", help="what `search --json FILE` wrote")


def _replay(options: argparse.Namespace) -> int:
    try:
        text = Path(options.file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UnusableInput(options.file, str(error)) from error
    plan, repeats, result = results.load(text, options.file)
    try:
        runs = [Run(replay(plan, trials), 0.0) for trials in repeats]
    except ReplayError as error:
        print(f"it does not lead to the same trials: {error}", file=sys.stderr)
        return 1
    again = results.result_of(plan, runs, result["environment"])
    sys.stdout.write(summary(again))
    same = all(again[name] == result[name] for name in ("verdict", "zero_loss_pps", "trials"))
    print("the same answer" if same else f"the result said {result['verdict']}")
    return 0 if same else 1

"""The sub-commands ``search`` (one search with one generator) and ``replay`` (repeat it from its result)."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from netplugin.api.errors import reason
from netplugin_zeroloss.cli.options import add_generator, add_goal, description_of, number, whole
from netplugin_zeroloss.generators.choose import make
from netplugin_zeroloss.generators.contract import Generator, GeneratorInfo
from netplugin_zeroloss.judge import judge
from netplugin_zeroloss.report import words
from netplugin_zeroloss.search import result as results
from netplugin_zeroloss.search.follow_up import FollowUpRun, follow_up
from netplugin_zeroloss.search.recorded import RepeatsEntry, ResultEntry
from netplugin_zeroloss.search.search import SearchRun, carry_out, replay, replayed, run_search
from netplugin_zeroloss.search.trials import SearchPlan
from netplugin_zeroloss.values import (
    MIXES,
    OTHER_GOALS,
    Measurement,
    ReplayError,
    TrialRequest,
    UnusableInput,
    headline,
    line_rate_pps,
    mean_size,
    warm_up_s,
)

#: Line rate in bit/s if neither the generator nor an option gives one.
_BITS_PER_SECOND = 10e9


def add_search(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "search",
        help="run one search with one generator",
        description="Find the highest load without loss. The result goes to standard output, progress"
        " to standard error.",
    )
    parser.set_defaults(command=_search)
    add_generator(parser)
    add_goal(parser)
    parser.add_argument(
        "--max-loss-ratio",
        type=number(0, 0.5, inclusive=True),
        default=0.0,
        metavar="RATIO",
        help="allowed loss ratio (default: 0)",
    )
    parser.add_argument(
        "--goal",
        action="append",
        choices=tuple(OTHER_GOALS),
        default=[],
        dest="goals",
        help="additional goal; repeatable",
    )
    parser.add_argument(
        "--warm-up",
        type=number(0, 3600, inclusive=True),
        metavar="S",
        help="warm-up: loss within the first S seconds of traffic does not count"
        " (default: a sixth of --final-duration)",
    )
    parser.add_argument(
        "--buffer-packets",
        type=whole(0, 10**9),
        default=2048,
        metavar="N",
        help="frames that rings and queues on the path can hold (default: %(default)s)",
    )
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument(
        "--frame-size",
        type=whole(64, 16_000),
        default=64,
        metavar="BYTES",
        help="frame size with FCS (default: %(default)s)",
    )
    sizes.add_argument("--mix", choices=tuple(MIXES), default="", help="mix of frame sizes")
    flows = "flows, which differ in the field of --vary (default: %(default)s)"
    parser.add_argument("--flows", type=whole(1, 10**9), default=1024, metavar="N", help=flows)
    parser.add_argument(
        "--burst",
        type=whole(1, 65_536),
        default=1,
        metavar="N",
        help="frames that each direction sends back to back; rates are means (default: %(default)s)",
    )
    parser.add_argument(
        "--vnf-ceiling-pps",
        type=number(0, 1e12),
        metavar="PPS",
        help="rate of the VNF without the backend, from a control run",
    )
    parser.add_argument(
        "--max-trials",
        type=whole(1, 100_000),
        default=150,
        metavar="N",
        help="maximum number of trials (default: %(default)s)",
    )
    parser.add_argument(
        "--repeats",
        type=whole(1, 1000),
        default=1,
        metavar="N",
        help="number of searches; reports the median with a confidence interval",
    )
    parser.add_argument(
        "--latency-duration",
        type=number(0, 3600, inclusive=True),
        default=0.0,
        metavar="S",
        help="then measure the latency at 10, 50 and 90 %% of the found rate, for S seconds each"
        " (default: 0, not at all)",
    )
    parser.add_argument(
        "--soak-duration",
        type=number(0, 604_800, inclusive=True),
        default=0.0,
        metavar="S",
        help="then hold the found rate for S seconds and report what is lost when (default: 0, not at all)",
    )
    parser.add_argument(
        "--seed",
        type=whole(0, 2**63),
        default=1,
        metavar="N",
        help="seed of the simulated device (default: %(default)s)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the full result as JSON (- : standard output)")
    parser.add_argument("--quiet", action="store_true", help="do not print progress")


def _search(options: argparse.Namespace) -> int:
    description = description_of(options)
    plan = _plan(options)
    _check_writable(options.json)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    with make(description) as generator:
        generator.info.check_burst(plan.burst, plan.mix)
        plan = _with_generator(plan, generator.info, options.line_rate_pps)
        runs = []
        for repeat in range(options.repeats):
            watch = None if options.quiet else _Progress(plan, repeat, options.repeats)
            runs.append(run_search(plan, generator, watch))
        followed = _follow_up(plan, generator, results.outcome_of(runs).answer_pps, options.quiet)
        where = results.environment(generator.info.name, sys.argv, started)
    result = results.result_of(plan, runs, where | {"seed": options.seed}, followed)
    _report(result, options.json)
    return 1 if result["verdict"] in ("failed", "dead_direction") else 0


def _follow_up(plan: SearchPlan, generator: Generator, rate: float | None, quiet: bool) -> FollowUpRun:
    begun = time.monotonic()
    watch = None if quiet else _Progress(plan, 0, 1)
    found = carry_out(follow_up(plan, rate), generator, watch)
    return FollowUpRun(found, time.monotonic() - begun)


def _plan(options: argparse.Namespace) -> SearchPlan:
    """Build the search plan from the options. Raises: UnusableInput."""
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
        latency_s=options.latency_duration,
        soak_s=options.soak_duration,
        burst=options.burst,
        vnf_ceiling_pps=options.vnf_ceiling_pps,
    )


def _with_generator(plan: SearchPlan, info: GeneratorInfo, line_pps: float | None) -> SearchPlan:
    """Complete the plan with the generator's limits; ``line_pps`` overrides the line rate of its ports."""
    size = mean_size(plan.mix) if plan.mix else plan.frame_size
    line_bps = info.line_bps if math.isfinite(info.line_bps) else _BITS_PER_SECOND
    return replace(
        plan,
        line_rate_pps=line_pps or line_rate_pps(line_bps, size),
        generator_max_pps=info.limit_pps(size),
        can_abort=info.can_abort,
        min_trial_s=info.min_trial_s,
        measures_latency=info.latency,
    )


def _check_writable(name: str | None) -> None:
    """Check the output path before any traffic is sent. Raises: UnusableInput."""
    if name is None or name == "-":
        return
    directory = Path(name).resolve().parent
    if not directory.is_dir() or Path(name).is_dir():
        raise UnusableInput("--json", f"{name} cannot be written: is it in a directory that exists?")


# -- what is printed -----------------------------------------------------------------------------


class _Progress:
    """Prints one line per trial to standard error."""

    def __init__(self, plan: SearchPlan, repeat: int, repeats: int) -> None:
        self._goal = plan.headline
        self._prefix = f"{repeat + 1}/{repeats} " if repeats > 1 else ""
        self._number = 0

    def __call__(self, request: TrialRequest, measured: Measurement) -> None:
        self._number += 1
        verdict = judge(request, measured, self._goal.relative_width, self._goal.max_loss_ratio)
        print(
            f"{self._prefix}trial {self._number:3d}  {pps(request.rate_pps):>12}"
            f"  {measured.elapsed_s:7.2f} of {request.duration_s:g} s  {verdict.verdict:7}"
            f"  {request.purpose}: {verdict.reason}",
            file=sys.stderr,
            flush=True,
        )


def pps(rate: float) -> str:
    """Format a rate such as ``4.2 Mpps``, with enough digits for a precision of 0.1 %."""
    for unit, size in (("Mpps", 1e6), ("kpps", 1e3)):
        if rate >= size:
            return f"{rate / size:.5g} {unit}"
    return f"{rate:.5g} pps"


def summary(result: ResultEntry) -> str:
    """Return the summary for the terminal: verdict, one rate per goal, bounds, repeats and cost."""
    lower, upper = (words.rate(bound, result["goal"]["relative_width"]) for bound in result["bounds_pps"])
    lines = [f"verdict    {result['verdict']}: {result['reason']}"]
    for entry in result["goals"]:
        rate, goal = entry["rate_pps"], entry["goal"]
        found = words.rate(rate, goal["relative_width"]) if rate is not None else "no rate"
        lines.append(f"{goal['name']:10} {found}  ({goal['in_words']})")
    lines.append(f"bounds     {lower} to {upper}")
    floor = result["evidence"]["floor"]
    if floor:
        lines.append(f"floor      {floor['loss_ratio']:.3g} of the frames, at {floor['place'] or '?'}")
    lines += _repeat_lines(result["repeats"], result["goal"]["relative_width"])
    lines += _follow_up_lines(result)
    lines.append(
        f"cost       {result['trials']} trials ({result['invalid_trials']} invalid),"
        f" {result['traffic_s']:.1f} s of traffic, {result['wall_s']:.1f} s in all"
    )
    return "".join(f"{line}\n" for line in lines)


def _repeat_lines(repeats: RepeatsEntry, width: float) -> Sequence[str]:
    if repeats["count"] == 1:
        return []
    counts = ", ".join(f"{count} {name}" for name, count in repeats["verdicts"].items())
    lines = [f"repeats    {repeats['count']}: {counts}"]
    if repeats["spread"]:
        found = repeats["spread"]
        median, low, high = (words.rate(r, width) for r in (found["median_pps"], *found["interval_pps"]))
        lines.append(f"median     {median}, from {low} to {high} with {found['confidence']:.1%} confidence")
    return lines


def _follow_up_lines(result: ResultEntry) -> Iterator[str]:
    latency, soak = result.get("latency"), result.get("soak")
    for load in latency["loads"] if latency else ():
        yield f"latency    at {load['part']:.0%} of it: {words.latency(load)}"
    if latency and not latency["loads"]:
        yield f"latency    not measured: {latency['reason']}"
    if soak:
        yield f"soak       {words.soak(soak, result['goal']['relative_width'])}"


def _report(result: ResultEntry, name: str | None) -> None:
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
        help="repeat a search on recorded trials; the answer must be the same",
        description="Repeat the search of a result on its recorded trials, without traffic. Exit status: 0 if"
        " the answer is the same, 1 if it differs.",
    )
    parser.set_defaults(command=_replay)
    parser.add_argument("file", metavar="FILE", help="result written by `search --json FILE`")


def _replay(options: argparse.Namespace) -> int:
    try:
        text = Path(options.file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UnusableInput(options.file, reason(error)) from error
    plan, repeats, result = results.load(text, options.file)
    recorded = results.followed(result, options.file)
    try:
        runs = [SearchRun(replay(plan, trials), 0.0) for trials in repeats]
        after = replayed(follow_up(plan, results.outcome_of(runs).answer_pps), recorded)
    except ReplayError as error:
        print(f"it does not lead to the same trials: {error}", file=sys.stderr)
        return 1
    again = results.result_of(plan, runs, result["environment"], FollowUpRun(after))
    sys.stdout.write(summary(again))
    same = all(again[name] == result[name] for name in ("verdict", "zero_loss_pps", "trials"))
    print("the same answer" if same else f"the result was {result['verdict']}")
    return 0 if same else 1

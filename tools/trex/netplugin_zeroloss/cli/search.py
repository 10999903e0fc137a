"""The sub-commands ``search`` (one search with one generator) and ``replay`` (repeat it from its result)."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from netplugin.api.errors import reason
from netplugin.api.field_errors import message
from netplugin_zeroloss.asked import BITS_PER_SECOND, SearchOptions, add_fields, trial_line
from netplugin_zeroloss.cli.frame import Commands, add_json, add_quiet, progress, write_out
from netplugin_zeroloss.cli.options import add_generator, description_of, number, whole
from netplugin_zeroloss.generators.choose import make
from netplugin_zeroloss.generators.contract import GeneratorInfo
from netplugin_zeroloss.report import words
from netplugin_zeroloss.search import result as results
from netplugin_zeroloss.search.follow_up import follow_up
from netplugin_zeroloss.search.recorded import GoalResult, PastTrial, ResultEntry
from netplugin_zeroloss.search.search import middle, replayed, run_repeats, search
from netplugin_zeroloss.search.trials import FAILURES, SearchPlan
from netplugin_zeroloss.values import MIXES, OTHER_GOALS, ReplayError, UnusableInput

#: The parameters of a search that are options of their own name, a number each.
_FIELDS = tuple(n for n in SearchOptions.model_fields if n not in ("goals", "preset", "strict_rfc9971"))


def add_search(commands: Commands) -> None:
    parser = commands.add_parser(
        "search",
        help="run one search with one generator",
        description="Find the highest load without loss. The result goes to standard output, progress"
        " to standard error.",
    )
    parser.set_defaults(command=_search)
    add_generator(parser)
    add_fields(parser, *_FIELDS)
    names = tuple(OTHER_GOALS)
    preset = "goal of a standard, instead of --final-duration and --max-loss-ratio: %(choices)s"
    parser.add_argument("--preset", choices=names, metavar="NAME", help=preset)
    more = "additional goal; repeatable: %(choices)s"
    parser.add_argument(
        "--goal", action="append", choices=names, default=[], dest="goals", metavar="NAME", help=more
    )
    strict = "search without the extensions to RFC 9971, such as early abort"
    parser.add_argument("--strict-rfc9971", action="store_true", help=strict)
    sizes = parser.add_mutually_exclusive_group()
    size = "frame size with FCS (default: %(default)s)"
    sizes.add_argument("--frame-size", type=whole(64, 16_000), default=64, metavar="BYTES", help=size)
    sizes.add_argument("--mix", choices=tuple(MIXES), default="", help="mix of frame sizes")
    flows = "flows, which differ in the field of --vary (default: %(default)s)"
    parser.add_argument("--flows", type=whole(1, 10**9), default=1024, metavar="N", help=flows)
    burst = "frames that each direction sends back to back; rates are means (default: %(default)s)"
    parser.add_argument("--burst", type=whole(1, 65_536), default=1, metavar="N", help=burst)
    ceiling = "rate of the VNF without the backend, from a control run"
    parser.add_argument("--vnf-ceiling-pps", type=number(0, 1e12), metavar="PPS", help=ceiling)
    seed = "seed of the simulated device (default: %(default)s)"
    parser.add_argument("--seed", type=whole(0, 2**63), default=1, metavar="N", help=seed)
    add_json(parser, "the full result")
    add_quiet(parser)


def _search(options: argparse.Namespace) -> int:
    description, say, seconds = description_of(options), progress(options.quiet), 0.0
    started = datetime.now(UTC).isoformat(timespec="seconds")

    def note(number: int, trial: PastTrial) -> None:
        nonlocal seconds
        seconds += trial.wall_s
        say(trial_line(plan, number, trial))

    with make(description) as generator:
        generator.info.check_burst(options.burst, options.mix)
        plan = _plan(options, generator.info)
        found, followed = run_repeats(plan, generator, options.repeats, note)
        where = results.environment(generator.info.name, sys.argv, started)
    result = results.result_of(plan, found, where | {"seed": options.seed}, followed, seconds)
    write_out(options.json, summary(result), results.dumps(result))
    return 1 if result["verdict"] in FAILURES else 0


def _plan(options: argparse.Namespace, info: GeneratorInfo) -> SearchPlan:
    """Return the plan for these options and the limits of the generator. Raises: UnusableInput."""
    fields = SearchOptions.model_fields.items()
    given = {n: value for n, field in fields if (value := getattr(options, n)) != field.default}
    try:
        asked = SearchOptions.model_validate(given)
    except ValidationError as error:
        raise UnusableInput("--preset", message(error.errors()[0])) from error
    line_bps = info.line_bps if math.isfinite(info.line_bps) else BITS_PER_SECOND
    frame, vnf = options.mix or options.frame_size, options.vnf_ceiling_pps
    return asked.plan(info, frame, options.flows, options.burst, line_bps, vnf_ceiling_pps=vnf)


def summary(result: ResultEntry) -> str:
    """Return the summary for the terminal: verdict, one rate per goal, bounds, repeats and cost."""
    return "".join(f"{name:10} {text}\n" for name, text in _summary(result))


def _summary(result: ResultEntry) -> Iterator[tuple[str, str]]:
    width, repeats, floor = result["goal"]["relative_width"], result["repeats"], result["evidence"]["floor"]
    lower, upper = (words.rate(bound, width) for bound in result["bounds_pps"])
    yield "verdict", f"{result['verdict']}: {result['reason']}"
    for entry in result["goals"]:
        rate, goal = entry["rate_pps"], entry["goal"]
        found = "no rate" if rate is None else words.rate(rate, goal["relative_width"])
        yield goal["name"], f"{found}  ({goal['in_words']})"
    yield "bounds", f"{lower} to {upper}"
    yield from (("RFC 9971", _standard(entry)) for entry in result["goals"])
    if floor:
        yield "floor", f"{floor['loss_ratio']:.3g} of the frames, at {floor['place'] or '?'}"
    if repeats["count"] > 1:
        counts = ", ".join(f"{count} {name}" for name, count in repeats["verdicts"].items())
        yield "repeats", f"{repeats['count']}: {counts}"
        if spread := repeats["spread"]:
            rates = (spread["median_pps"], *spread["interval_pps"])
            median, low, high = (words.rate(rate, width) for rate in rates)
            yield "median", f"{median}, from {low} to {high} with {spread['confidence']:.1%} confidence"
    if latency := result.get("latency"):
        for load in latency["loads"]:
            yield "latency", f"at {load['part']:.0%} of it: {words.latency(load)}"
        if not latency["loads"]:
            yield "latency", f"not measured: {latency['reason']}"
    if soak := result.get("soak"):
        yield "soak", words.soak(soak, width)
    trials = f"{result['trials']} trials ({result['invalid_trials']} invalid)"
    yield "cost", f"{trials}, {result['traffic_s']:.1f} s of traffic, {result['wall_s']:.1f} s in all"


def _standard(entry: GoalResult) -> str:
    """Return the goal result of RFC 9971: its relevant bounds and the conditional throughput."""
    width, found = entry["goal"]["relative_width"], entry["rfc9971"]
    rates = found["relevant_lower_bound_pps"], found["relevant_upper_bound_pps"]
    lower, upper, throughput = (
        "none" if rate is None else words.rate(rate, width)
        for rate in (*rates, found["conditional_throughput_pps"])
    )
    bounds = f"{'regular' if found['regular'] else 'irregular'}, lower {lower}, upper {upper}"
    return f"{entry['goal']['name']}: {bounds}, conditional throughput {throughput}"


def add_replay(commands: Commands) -> None:
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
    plan, repeats, recorded, result = results.load(text, options.file)
    try:
        found = [replayed(search(plan), trials) for trials in repeats]
        after = replayed(follow_up(plan, found[middle(found)].headline.answer_pps), recorded)
    except ReplayError as error:
        print(f"it does not lead to the same trials: {error}", file=sys.stderr)
        return 1
    again = results.result_of(plan, found, result["environment"], after)
    sys.stdout.write(summary(again))
    same = all(again[name] == result[name] for name in ("verdict", "zero_loss_pps", "trials"))
    print("the same answer" if same else f"the result was {result['verdict']}")
    return 0 if same else 1

"""The sub-command ``evaluate``: compares search algorithms on simulated devices with known answers."""

from __future__ import annotations

import argparse
import os
import sys

from netplugin.acceptance import algorithms as searches
from netplugin.acceptance.cli_options import add_goal, whole
from netplugin.acceptance.errors import UnusableInput
from netplugin.acceptance.evaluate import Progress, as_csv, as_json, as_table, evaluate
from netplugin.acceptance.generators.sim import FAMILIES
from netplugin.acceptance.trials import SearchPlan
from netplugin.acceptance.values import line_rate_pps, strict_goal

_FORMATS = {"table": as_table, "json": as_json, "csv": as_csv}


def add_evaluate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "evaluate",
        help="compare search algorithms on simulated devices with known answers",
        description="Trials, traffic, error and spread of each search on each simulated device."
        " No traffic is sent. The same seed gives the same table.",
    )
    parser.set_defaults(command=_evaluate)
    parser.add_argument(
        "--devices", metavar="NAME,...", default=",".join(FAMILIES), help="default: all"
    )
    parser.add_argument(
        "--algorithms", metavar="NAME,...", default=",".join(searches.ALGORITHMS),
        help="default: %(default)s; mlrsearch needs the extra [evaluate]",
    )  # fmt: skip
    parser.add_argument("--runs", type=whole(1, 100_000), default=100, metavar="N")
    parser.add_argument("--seed", type=whole(0, 2**63), default=1, metavar="N")
    parser.add_argument(
        "--jobs", type=whole(1, 1024), default=os.cpu_count() or 1, metavar="N",
        help="number of processes (default: one per CPU)",
    )  # fmt: skip
    parser.add_argument("--format", choices=tuple(_FORMATS), default="table")
    parser.add_argument("--quiet", action="store_true", help="do not print progress")
    add_goal(parser)


def _evaluate(options: argparse.Namespace) -> int:
    devices = options.devices.split(",")
    for device in devices:
        if device not in FAMILIES:
            raise UnusableInput("--devices", f"no {device!r}; there are {', '.join(FAMILIES)}")
    names = options.algorithms.split(",")
    searches.usable(names)
    goal = strict_goal(options.final_duration, options.precision, options.initial_duration)
    plan = SearchPlan(
        (goal,),
        options.line_rate_pps or line_rate_pps(10e9, 64),
        warm_up_s=options.final_duration / 6,
    )
    progress: Progress = (lambda done, of: None) if options.quiet else _progress
    rows = evaluate(plan, devices, names, options.runs, options.seed, options.jobs, progress)
    sys.stdout.write(_FORMATS[options.format](rows))
    return 0


def _progress(done: int, of: int) -> None:
    """Print progress: one line rewritten in place on a terminal, otherwise about ten lines."""
    if sys.stderr.isatty():
        print(f"\r{done} of {of} searches", end="\n" if done == of else "", file=sys.stderr)
    elif done == of or done * 10 // of != (done - 10) * 10 // of:
        print(f"{done} of {of} searches", file=sys.stderr, flush=True)

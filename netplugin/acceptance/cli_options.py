"""Option types shared by several sub-commands; argparse rejects numbers out of range."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def number(
    low: float, high: float = math.inf, *, inclusive: bool = False
) -> Callable[[str], float]:
    """Accept a finite number above ``low`` (``inclusive``: from ``low``) and at most ``high``."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
        if (
            not math.isfinite(value)
            or value > high
            or value < low
            or (value == low and not inclusive)
        ):
            least = "at least" if inclusive else "above"
            most = f" and at most {high:g}" if math.isfinite(high) else ""
            raise argparse.ArgumentTypeError(f"{text} is not {least} {low:g}{most}")
        return value

    return parse


def whole(low: int, high: int) -> Callable[[str], int]:
    """Accept an integer from ``low`` to ``high``."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is not from {low} to {high}")
        return value

    return parse


def add_goal(parser: argparse.ArgumentParser) -> None:
    """Add the options of the headline goal and the line rate."""
    parser.add_argument(
        "--line-rate-pps", type=number(0, 1e12), metavar="PPS",
        help="line rate in frames per second, both directions together: the maximum load"
        " (default: 10 Gbit/s at the frame size)",
    )  # fmt: skip
    parser.add_argument(
        "--precision", type=number(0, 0.5), default=0.005, metavar="RATIO",
        help="relative width of the result: upper <= lower * (1 + RATIO) (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--final-duration", type=number(0, 86_400), default=60.0, metavar="S",
        help="duration in seconds of the deciding trial (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument(
        "--initial-duration", type=number(0, 3600), default=0.4, metavar="S",
        help="duration in seconds of the first, short trials (default: %(default)g)",
    )  # fmt: skip

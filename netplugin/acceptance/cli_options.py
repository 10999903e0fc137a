"""Types of options that several sub-commands have: a number out of range is refused by argparse."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def number(
    low: float, high: float = math.inf, *, inclusive: bool = False
) -> Callable[[str], float]:
    """A finite number above ``low`` (or from it on), and at most ``high``."""

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
    """A whole number in this range."""

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
    """What the headline asks for, and of which line."""
    parser.add_argument(
        "--line-rate-pps", type=number(0, 1e12), metavar="PPS",
        help="frames a second of the line, both directions together: nothing is asked above it"
        " (default: 10 Gbit/s at the frame size)",
    )  # fmt: skip
    parser.add_argument(
        "--precision", type=number(0, 0.5), default=0.005, metavar="RATIO",
        help="how close the bounds are: upper <= lower * (1 + RATIO) (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--final-duration", type=number(0, 86_400), default=60.0, metavar="S",
        help="seconds without loss that make a rate zero-loss (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument(
        "--initial-duration", type=number(0, 3600), default=0.4, metavar="S",
        help="seconds of the short trials that find where to look (default: %(default)g)",
    )  # fmt: skip

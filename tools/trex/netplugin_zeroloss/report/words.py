"""Number formats of reports: only significant digits, and never rounded up."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from netplugin_zeroloss.journal import Cell
from netplugin_zeroloss.search.recorded import SoakEntry

#: Text for a missing value.
NONE: Final = "-"


def digits_of(relative_width: float) -> int:
    """Return the significant digits for this width: 3 for 0.5 %, 4 for 0.05 %."""
    if not 0 < relative_width < 1:
        return 3
    return min(6, max(2, math.ceil(-math.log10(2 * relative_width)) + 1))


def mpps(rate_pps: float, digits: int = 3) -> str:
    """Format a rate in Mpps, truncated so that it never overstates the measurement."""
    if rate_pps < 1e-3 or not math.isfinite(rate_pps):
        return "0"
    millions = rate_pps / 1e6
    places = max(0, digits - 1 - math.floor(math.log10(millions) + 1e-12))
    scale = 10**places
    return f"{math.floor(millions * scale * (1 + 1e-12)) / scale:.{places}f}"


def found(rate_pps: float, relative_width: float) -> str:
    """Format a rate that a search found, the same everywhere: with the digits of its goal's width."""
    return mpps(rate_pps, digits_of(relative_width))


def rate(rate_pps: float, relative_width: float) -> str:
    """Format a rate that a search found, with its unit: ``4.19 Mpps``."""
    return f"{found(rate_pps, relative_width)} Mpps"


def requested(rate_pps: float) -> str:
    """Format the rate of a trial, which is exact."""
    return mpps(rate_pps, 5)


def percent(ratio: float, digits: int = 0) -> str:
    return f"{100 * ratio:.{digits}f} %"


def ratio(value: float) -> str:
    """Format a loss ratio: ``2.5 %``, ``1.7 frames in a million``."""
    if value >= 1e-3:
        return percent(value, 1)
    for many, name in ((1e6, "a million"), (1e9, "a billion")):
        if value * many >= 0.1:
            return f"{value * many:.2g} frames in {name}"
    return f"{value:.1e}"


def count(number: float, one: str, many: str | None = None) -> str:
    """Format a count: ``1 trial``, ``2 trials``."""
    return f"{number:,.0f} {one if number == 1 else many or one + 's'}"


def axes(cell: Cell) -> str:
    """Format all but backend and cores: ``64-byte frames, 1,024 flows, 1 queue, VNF in mode io``."""
    parts = [
        f"{cell.frame}-byte frames" if cell.frame.isdecimal() else cell.frame,
        count(cell.flows, "flow"),
        count(cell.queues, "queue"),
        f"VNF in mode {cell.vnf_mode}" if cell.vnf_mode else "",
        f"bursts of {cell.burst} frames" if cell.burst > 1 else "",
        f"VNF {cell.numa} to the NICs" if cell.numa else "",
    ]
    return ", ".join(filter(None, parts))


def seconds(value: float) -> str:
    """Format a duration: ``0.4 s``, ``61 s``, ``12 min``, ``3.5 h``."""
    if value < 120:
        return f"{value:.3g} s"
    if value < 7200:
        return f"{value / 60:.0f} min"
    return f"{value / 3600:.1f} h"


def latency(load: Mapping[str, Any]) -> str:
    """Format the latency at a load: ``p50 21 us, p90 25 us, p99 31 us, max 40 us (20,000 samples)``."""
    if not load["samples"]:
        return "no samples"
    shown = ", ".join(f"{name} {load[f'{name}_us']:.4g} us" for name in ("p50", "p90", "p99", "max"))
    lossy = "" if load["verdict"] == "passed" else f", {load['verdict']}"
    return f"{shown} ({count(load['samples'], 'sample')}{lossy})"


def soak(held: SoakEntry, relative_width: float) -> str:
    """Format a soak: ``60 s at 4.19 Mpps: no frame lost``."""
    if held["verdict"] is None:
        return f"not held: {held['reason']}"
    lost = "no frame lost"
    if held["lost_packets"]:
        lost = f"{count(held['lost_packets'], 'frame')} lost ({ratio(held['loss_ratio'])})"
    if held["verdict"] == "invalid":
        lost = f"invalid: {held['reason']}"
    return f"{seconds(held['elapsed_s'])} at {rate(held['rate_pps'], relative_width)}: {lost}"

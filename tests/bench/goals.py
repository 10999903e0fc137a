"""What the figures are to reach, and whether they do (pure)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain

from tests.bench import names
from tests.bench.quantiles import three_digits
from tests.bench.values import Run, Series

_Find = Callable[[Run], float | None]


@dataclass(frozen=True, slots=True)
class Goal:
    """``find`` gives the figure, None if the run has not measured it."""

    text: str
    limit: float
    find: _Find
    unit: str = ""
    #: The figure is to be at least the limit, not at most.
    more: bool = False

    @property
    def desired(self) -> str:
        return f"{'>=' if self.more else '<='} {self.limit:g}{_space(self.unit)}"

    def met(self, measured: float) -> bool:
        return measured >= self.limit if self.more else measured <= self.limit

    def shown(self, measured: float) -> str:
        return f"{three_digits(measured)}{_space(self.unit)}"


def _space(unit: str) -> str:
    return f" {unit}" if unit else ""


def goals() -> tuple[Goal, ...]:
    """Of several numbers of ports the worst counts."""
    return (
        Goal("plug p50, 1 address, relative to os-vif without a filter", 1.45, _relative_to("os-vif")),
        Goal("the same relative to ovsdbapp and ovs-ofctl", 0.4, _relative_to("usual-tools")),
        Goal("64 at once, faster than os-vif in turn by", 5.0, _at_once, "times", more=True),
        Goal("start to ready, 1,000 ports", 3.0, _median(names.START, "to ready", ports=1000), "s"),
        Goal("drift and writes of such a start", 0, _touched),
        Goal("1,000 ports from nothing", 4.5, _median(names.FROM_NOTHING, "plug of all", ports=1000), "s"),
        Goal("longest stall of vswitchd during it", 250, _stall, "ms"),
        Goal("linuxbridge plug p50, 1 address", 22, _linuxbridge, "ms"),
        Goal("RSS with 1,000 ports", 110, _rss, "MB"),
    )


def _p50(series: Series | None) -> float | None:
    return statistics.median(series.samples) if series else None


def _median(workload: str, figure: str, ports: int) -> _Find:
    def found(run: Run) -> float | None:
        series = [each for each in run.of(workload, figure, "agent") if each.ports == ports]
        return _p50(series[0]) if series else None

    return found


def _worst(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _relative_to(other: str) -> _Find:
    def found(run: Run) -> float | None:
        ratios = []
        for series in run.of(names.ONE_PORT, "plug", "agent"):
            reference = run.find(names.ONE_PORT, "plug", other, series.ports)
            if series.addresses == 1 and reference:
                ratios.append(statistics.median(series.samples) / statistics.median(reference.samples))
        return _worst(ratios)

    return found


def _at_once(run: Run) -> float | None:
    ours = _p50(run.find(names.TOGETHER, "at once", ports=0, addresses=1))
    theirs = _p50(run.find(names.TOGETHER, "in turn", "os-vif", ports=0))
    return theirs / ours if ours and theirs else None


def _touched(run: Run) -> float | None:
    figures = [series for name in ("drift", "writes") for series in run.of(names.START, name)]
    return _worst(chain.from_iterable(each.samples for each in figures))


def _stall(run: Run) -> float | None:
    return _worst(chain.from_iterable(each.samples for each in run.of(names.FROM_NOTHING, "longest stall")))


def _linuxbridge(run: Run) -> float | None:
    return _worst(_p50(each) for each in run.of(names.LINUXBRIDGE, "plug", "agent") if each.addresses == 1)


def _rss(run: Run) -> float | None:
    series = run.find(names.RESOURCES, "RSS", ports=1000)
    return max(series.samples) if series else None

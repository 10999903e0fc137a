"""What the figures are to reach, and whether they do (pure)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain

from tests.bench import names
from tests.bench.quantiles import quantile, three_digits
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
    def wanted(self) -> str:
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
        Goal(
            "plug p50, 1 address, relative to os-vif, 0 to 100 ports", 1.0, _beside_os_vif(lambda n: n <= 100)
        ),
        Goal("the same at 1,000 ports", 0.8, _beside_os_vif(lambda n: n == 1000)),
        Goal("the same relative to ovs-vsctl, vswitchd's default log", 0.6, _beside_vsctl),
        Goal("own share p50, 1 address, at every number of ports", 1.0, _own_share_p50, "ms"),
        Goal("own share p99, of all ports in turn", 5.0, _own_share_p99, "ms"),
        Goal("64 at once, faster than os-vif in turn by", 8.0, _at_once, "times", more=True),
        Goal("start to ready, 1,000 ports", 0.5, _median(names.START, "to ready", ports=1000), "s"),
        Goal("drift and writes of such a start", 0, _touched),
        Goal("1,000 ports from nothing", 4.0, _median(names.FROM_NOTHING, "plug of all", ports=1000), "s"),
        Goal("longest stall of vswitchd during it", 250, _stall, "ms"),
        Goal("linuxbridge plug p50, 1 address", 25, _linuxbridge, "ms"),
        Goal("RSS with 1,000 ports", 80, _rss, "MB"),
        Goal("open loop at 50 plugs/s, 500 ports, p99", 150, _open_loop, "ms"),
        Goal("refused of these", 0, _refused),
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


def _beside(run: Run, workload: str, other: str, which: Callable[[int], bool]) -> float | None:
    found = []
    for series in run.of(workload, "plug", "agent"):
        beside = run.find(workload, "plug", other, series.ports)
        if series.addresses == 1 and beside and series.ports is not None and which(series.ports):
            found.append(statistics.median(series.samples) / statistics.median(beside.samples))
    return _worst(found)


def _beside_os_vif(which: Callable[[int], bool]) -> _Find:
    return lambda run: _beside(run, names.ONE_PORT, "os-vif", which)


def _beside_vsctl(run: Run) -> float | None:
    return _beside(run, names.DEFAULT_LOG, "ovs-vsctl add-port", lambda _: True)


def _own_share_p50(run: Run) -> float | None:
    return _worst(_p50(each) for each in run.of(names.ONE_PORT, "own share") if each.addresses == 1)


def _own_share_p99(run: Run) -> float | None:
    samples = list(chain.from_iterable(each.samples for each in run.of(names.ONE_PORT, "own share")))
    found = quantile(samples, 0.99)
    return found.value if found else None


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


def _open_loop_at_50(run: Run, figure: str) -> Series | None:
    return run.find(names.OPEN_LOOP, figure, ports=500, addresses=1, rate=50)


def _open_loop(run: Run) -> float | None:
    series = _open_loop_at_50(run, f"plug, {names.PLUGS}")
    found = quantile(series.samples, 0.99) if series else None
    return found.value if found else None


def _refused(run: Run) -> float | None:
    series = _open_loop_at_50(run, f"refused, {names.PLUGS}")
    return sum(series.samples) if series else None

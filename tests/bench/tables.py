"""A run as Markdown: the goals, and a table for each workload (pure)."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from tests.bench import names
from tests.bench.comparison import Row
from tests.bench.goals import goals
from tests.bench.quantiles import Quantile, quantile, three_digits
from tests.bench.values import Run, Series

Cells = Sequence[str]

#: Of ways whose name does not say what they leave out.
_NAMES = {
    "usual-tools": "ovsdbapp, then ovs-ofctl: port, filter, read back",
    "os-vif-bridge": "os-vif 4, the bridge alone: it makes no port",
}


def markdown(run: Run) -> str:
    """Return all tables of a run."""
    parts = [_machine(run), "### Goals", goal_table(run)]
    for title, text in (
        ("One port on OVS-DPDK", _one_port(run)),
        ("One port, with vswitchd's default log", _default_log(run)),
        ("64 ports", _together(run)),
        ("Open loop", _open_loop(run)),
        ("1,000 ports", _many(run)),
        ("One port on a Linux bridge", _linuxbridge(run)),
        ("What the agent takes", _resources(run)),
    ):
        if text:
            parts += [f"### {title}", text]
    if run.notes:
        parts.append("\n".join(f"- {note}" for note in run.notes))
    return "\n\n".join(parts) + "\n"


def goal_table(run: Run) -> str:
    """Return wanted and measured, so that a miss is seen."""
    rows = []
    for goal in goals():
        measured = goal.find(run)
        if measured is None:
            rows.append([goal.text, goal.desired, "not measured", ""])
        else:
            rows.append(
                [goal.text, goal.desired, goal.shown(measured), "yes" if goal.met(measured) else "**no**"]
            )
    return table(["figure", "goal", "measured", "met"], rows)


def comparison_table(rows: Iterable[Row]) -> str:
    """Return old, new and their ratio; that of blocks, by which it is judged, may differ a little."""
    return table(
        ["figure", "old", "new", "ratio (99 % interval)", "judged"],
        [
            [
                f"{row.label} [{row.unit}]" if row.unit else row.label,
                three_digits(row.before),
                three_digits(row.after),
                f"{row.ratio:.2f} ({row.low:.2f} to {row.high:.2f})"
                + (f", beside {row.yardstick}" if row.yardstick else ""),
                str(row.verdict),
            ]
            for row in rows
        ],
    )


def table(head: Cells, rows: Iterable[Cells]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _machine(run: Run) -> str:
    m = run.machine
    text = (
        f"Measured on {run.started} in {run.took_s / 60:.0f} minutes (form `{run.form}`): "
        f"{m.cpu}, {m.cpus} CPUs, {m.memory_gb} GB, Linux {m.kernel}, "
        f"Open vSwitch {m.open_vswitch}, {m.dpdk}, Python {m.python}, "
        f"ovsdbapp {m.ovsdbapp}, os-vif {m.os_vif}, libvirt {m.libvirt}; load before the run {m.load:g}."
    )
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def _one_port(run: Run) -> str:
    rows = []
    for ports in _distinct(each.ports for each in run.of(names.ONE_PORT, "plug")):
        yardstick = run.find(names.ONE_PORT, "plug", "os-vif", ports)
        for series in run.of(names.ONE_PORT, "plug"):
            if series.ports == ports:
                rows.append([f"{ports:,}", _way(series), *_quantiles(series), _relative(series, yardstick)])
                rows += [
                    [f"{ports:,}", f"- {part.figure}", *_quantiles(part), ""] for part in _parts(run, series)
                ]
        stall = run.find(names.ONE_PORT, "longest stall", "ovs-vswitchd", ports)
        if stall:
            rows.append([f"{ports:,}", "longest stall of vswitchd", f"{max(stall.samples):.0f}", "", ""])
    return _table_of(["ports", "one port", "p50 ms", "p99 ms", "p50 relative to os-vif"], rows)


def _parts(run: Run, plug: Series) -> Iterator[Series]:
    """Yield what a plug of the agent is made of, for the filter of one address."""
    if plug.way == "agent" and plug.addresses == 1:
        for each in run.of(plug.workload, way="agent"):
            same = (each.ports, each.addresses) == (plug.ports, plug.addresses)
            if same and each.figure != "plug":
                yield each


def _default_log(run: Run) -> str:
    yardstick = next(run.of(names.DEFAULT_LOG, "plug", "ovs-vsctl add-port"), None)
    rows = [
        [_way(series), *_quantiles(series), _relative(series, yardstick)]
        for series in run.of(names.DEFAULT_LOG, "plug")
    ]
    return _table_of(["one port", "p50 ms", "p99 ms", "p50 relative to ovs-vsctl"], rows)


def _together(run: Run) -> str:
    first = next(run.of(names.TOGETHER, "at once"), None)
    rows = [
        [
            f"{series.way}, {series.figure}",
            f"{statistics.median(series.samples) / 1e3:.3f}",
            _relative(series, first),
        ]
        for series in run.of(names.TOGETHER)
        if series.figure != "longest stall"
    ]
    rows += [_stall_row(series, "") for series in run.of(names.TOGETHER, "longest stall")]
    return _table_of(["64 ports", "s", "relative to at once"], rows)


def _open_loop(run: Run) -> str:
    rows = []
    found = [(each, kind) for kind in names.KINDS for each in run.of(names.OPEN_LOOP, f"plug, {kind}")]
    for series, kind in found:
        ports, rate = series.ports, series.rate
        refused = run.find(names.OPEN_LOOP, f"refused, {kind}", "agent", ports, series.addresses, rate)
        stall = run.find(names.OPEN_LOOP, f"longest stall, {kind}", "ovs-vswitchd", ports, rate=rate)
        unplug = run.find(names.OPEN_LOOP, f"unplug, {kind}", "agent", ports, rate=rate)
        rows.append(
            [
                f"{series.rate:g}",
                "as many" if kind == names.TURNOVER else "none",
                f"{series.ports:,}",
                str(len(series.samples)),
                *(_shown(quantile(series.samples, share)) for share in (0.5, 0.99, 0.999)),
                _shown(quantile(unplug.samples, 0.5)) if unplug else "",
                f"{sum(refused.samples):.0f}" if refused else "",
                f"{max(stall.samples):.0f}" if stall else "",
            ]
        )
    head = [
        "plugs/s",
        "unplugs",
        "ports",
        "answers",
        "p50 ms",
        "p99 ms",
        "p99.9 ms",
        "unplug p50 ms",
        "refused",
        "longest stall of vswitchd, ms",
    ]
    return _table_of(head, rows)


def _many(run: Run) -> str:
    rows = []
    for workload in (names.FROM_NOTHING, names.START, names.RECOVERY):
        for series in run.of(workload):
            text = f"{workload}: {series.figure}, {series.ports:,} ports"
            rows.append([text, *_spread(series)])
    return _table_of(["", "median", "lowest to highest"], rows)


def _linuxbridge(run: Run) -> str:
    rows = []
    for ports in _distinct(each.ports for each in run.of(names.LINUXBRIDGE, "plug")):
        yardstick = run.find(names.LINUXBRIDGE, "plug", "ip -batch", ports)
        for series in run.of(names.LINUXBRIDGE, "plug"):
            if series.ports == ports:
                rows.append([f"{ports:,}", _way(series), *_quantiles(series), _relative(series, yardstick)])
                rows += [
                    [f"{ports:,}", f"- {part.figure}", *_quantiles(part), ""] for part in _parts(run, series)
                ]
    return _table_of(["ports", "one port", "p50 ms", "p99 ms", "p50 relative to ip -batch"], rows)


def _resources(run: Run) -> str:
    rows = [
        [f"{series.figure}, {series.ports:,} ports", *_spread(series)] for series in run.of(names.RESOURCES)
    ]
    return _table_of(["agent", "median", "lowest to highest"], rows)


def _table_of(head: Cells, rows: Sequence[Cells]) -> str:
    return table(head, rows) if rows else ""


def _stall_row(series: Series, last: str) -> Cells:
    return ["longest stall of vswitchd", f"{max(series.samples) / 1e3:.3f}", last]


def _way(series: Series) -> str:
    if series.addresses is None:
        return _NAMES.get(series.way, series.way)
    return (
        f"{series.way}, verified, filter of {series.addresses} address{'es' if series.addresses > 1 else ''}"
    )


def _quantiles(series: Series) -> tuple[str, str]:
    return _shown(quantile(series.samples, 0.5)), _shown(quantile(series.samples, 0.99))


def _shown(found: Quantile | None) -> str:
    """Return the value with its interval; nothing if there are too few samples."""
    if found is None:
        return ""
    high = "..." if found.high is None else three_digits(found.high)
    return f"{three_digits(found.value)} ({three_digits(found.low)} to {high})"


def _spread(series: Series) -> tuple[str, str]:
    unit = f" {series.unit}" if series.unit else ""
    middle, low, high = statistics.median(series.samples), min(series.samples), max(series.samples)
    spread = "" if low == high else f"{three_digits(low)} to {three_digits(high)}"
    return f"{three_digits(middle)}{unit}", spread


def _relative(series: Series, yardstick: Series | None) -> str:
    if yardstick is None:
        return ""
    return f"{statistics.median(series.samples) / statistics.median(yardstick.samples):.2f}"


def _distinct(values: Iterable[int | None]) -> list[int]:
    return sorted({value for value in values if value is not None})

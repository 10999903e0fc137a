"""The commands ``netplugin pmd show|set``."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from cliff.columns import FormattableColumn

from netplugin.cli import show

if TYPE_CHECKING:
    from pydantic import BaseModel

Values = dict[str, Any]


class PmdShow(show.Asks, show.ShowOne):
    """Show the PMD threads of OVS with their load and queues.

    Or propose an assignment of queues.
    """

    def add_options(self, parser: ArgumentParser) -> None:
        words = "measure for S seconds (at most 60) instead of since the threads started"
        parser.add_argument("--interval", type=show.seconds, metavar="S", help=words)
        show.flag(parser, "--propose", "show a better assignment of queues")

    def take_action(self, parsed_args: Namespace) -> show.Shown:
        interval = parsed_args.interval
        path = "/v1/pmd/proposal" if parsed_args.propose else "/v1/pmd"
        # Of an interval that the agent refuses nothing is waited for.
        more_s = interval if interval and 0 < interval <= 60 else 0.0
        return _shown(self.read(path, more_s, interval=interval).values())


class PmdSet(show.Changes, show.ShowOne):
    """Set the CPUs of OVS's PMD threads, or pin queues to them.

    Or configure auto load balancing.
    """

    def add_options(self, parser: ArgumentParser) -> None:
        cores = parser.add_mutually_exclusive_group()
        cores.add_argument("--cpus", metavar="LIST", help="run PMD threads on these CPUs, such as 2-5,8")
        words = "run N PMD threads, one per physical core, on the NUMA nodes of NICs and VMs"
        show.number(cores, "--count", "N", words)
        show.flag(parser, "--siblings", "with --count: a thread on both CPUs of each core")
        parser.add_argument(
            "--affinity",
            action="append",
            type=_pin,
            default=[],
            metavar="PORT:QUEUE=CPU",
            help="pin a receive queue to the CPU of a PMD thread; may be given several times. PORT is "
            "the interface in OVS, `port` in pmd show -f json",
        )
        parser.add_argument(
            "--clear-affinity",
            action="append",
            nargs="?",
            const=None,
            default=[],
            metavar="PORT",
            help="remove the pinnings of this port, or of all ports, before --affinity is applied",
        )
        parser.add_argument("--auto-lb", choices=("on", "off"), help="PMD auto load balancing of OVS")
        show.number(parser, "--auto-lb-load", "PERCENT", "thread load that triggers balancing")
        show.number(parser, "--auto-lb-improvement", "PERCENT", "least change of load variance")
        show.number(parser, "--auto-lb-interval", "MINUTES", "minimum interval between balancing runs")
        show.flag(parser, "--proposed", "apply the assignment of `pmd show --propose`")

    def take_action(self, parsed_args: Namespace) -> show.Shown:
        from netplugin.api.field_errors import valid
        from netplugin.api.pmd_models import PmdRequest

        return _shown(self.agent.set_pmd(valid(PmdRequest, _asked(parsed_args))))


def _asked(parsed_args: Namespace) -> dict[str, Any]:
    """The request, with only the options that were given."""
    affinity: dict[str, dict[str, int]] = {}
    for port, queue, cpu in parsed_args.affinity:
        affinity.setdefault(port, {})[queue] = cpu
    balance = {
        "enabled": parsed_args.auto_lb and parsed_args.auto_lb == "on",
        "load_threshold": parsed_args.auto_lb_load,
        "improvement_threshold": parsed_args.auto_lb_improvement,
        "interval_minutes": parsed_args.auto_lb_interval,
    }
    asked = {
        "cpus": parsed_args.cpus,
        "count": parsed_args.count,
        "siblings": parsed_args.siblings or None,
        "affinity": affinity or None,
        "clear_affinity": tuple(port for port in parsed_args.clear_affinity if port) or None,
        "clear_all_affinity": None in parsed_args.clear_affinity or None,
        "auto_load_balance": {k: v for k, v in balance.items() if v is not None} or None,
        "proposed": parsed_args.proposed or None,
    }
    return {name: value for name, value in asked.items() if value is not None}


def _pin(text: str) -> tuple[str, str, int]:
    """Parse PORT:QUEUE=CPU such as ``dpdk0:1=3``; a port name may contain colons."""
    place, equals, cpu = text.rpartition("=")
    port, colon, queue = place.rpartition(":")
    if not (equals and colon and port and queue.isdecimal() and cpu.isdecimal()):
        raise ArgumentTypeError(f"{text!r} is not PORT:QUEUE=CPU, like dpdk0:1=3")
    return port, str(int(queue)), int(cpu)


class _Cores(FormattableColumn[list[Values]]):
    """A line per PMD thread and per receive queue of the thread."""

    def human_readable(self) -> str:
        return "\n".join(line for core in self._value for line in self._lines(core))

    def _lines(self, core: Values) -> Iterator[str]:
        isolated = ", isolated" if core["isolated"] else ""
        head = f"cpu {core['cpu']} (NUMA node {core['numa_node']}{isolated}): busy "
        yield head + ", ".join([_percent(core["busy_percent"]), *_figures(core)])
        for queue in core["queues"]:
            state = "" if queue["enabled"] else " (disabled)"
            words = [_percent(queue["usage_percent"])]
            if queue["pinned_to"] is not None:
                lost = "" if queue["pinned_to"] == core["cpu"] else f" to CPU {queue['pinned_to']}"
                words.append(f"pinned{lost}")
            if queue["numa_mismatch"]:
                words.append(f"port on NUMA node {queue['port_numa_node']}")
            yield f"  {_name(queue)} queue {queue['queue']}{state}: {', '.join(words)}"


class _Queues(FormattableColumn[list[Values]]):
    """A table of queues: load, current CPU and proposed CPU."""

    def human_readable(self) -> str:
        head = ("queue", "node", "load", "PMD now", "PMD proposed")
        return show.aligned([head, *map(self._cells, self._value)])

    def _cells(self, queue: Values) -> tuple[str, ...]:
        node, there = queue["port_numa_node"], queue["proposed_cpu"]
        proposed = "any" if there is None else str(there)
        return (
            f"{_name(queue)} {queue['queue']}",
            "-" if node is None else str(node),
            f"{queue['load_percent']} %",
            str(queue["cpu"]),
            proposed + (" *" if there not in (None, queue["cpu"]) else ""),
        )


class _Each(FormattableColumn[list[Values]]):
    """A line per object: its text, its queue, or its values."""

    def human_readable(self) -> str:
        return "\n".join(map(self._line, self._value))

    def _line(self, one: Values) -> str:
        if "queue" in one:
            return f"{_name(one)} queue {one['queue']}"
        return str(one["text"]) if "text" in one else " ".join(map(str, one.values()))


_COLUMNS = {"cores": _Cores, "unpolled": _Each, "chosen": _Each, "queues": _Queues, "advice": _Each}


def _name(queue: Values) -> str:
    """The port and the VM that a queue is of; of others, which are no ports of ours, the interface."""
    if not queue["port_id"]:
        return str(queue["port"])
    vm = f" of VM {queue['vm_id']}" if queue["vm_id"] else ""
    return f"port {queue['port_id']}{vm}"


def _shown(of: Values | BaseModel) -> show.Shown:
    return show.fields(of, _COLUMNS)


def _figures(core: Values) -> Iterator[str]:
    if core["overhead_percent"] is not None:
        yield f"overhead {core['overhead_percent']} %"
    if core["packets"] is not None:
        yield f"{core['packets']} packets"
    if core["cycles_per_packet"] is not None:
        own = core["processing_cycles_per_packet"]
        processing = "" if own is None else f" ({own:g} processing)"
        yield f"{core['cycles_per_packet']:g} cycles a packet{processing}"
    if core["upcalls"]:
        yield f"{core['upcalls']} upcalls"
    if core["lost_upcalls"]:
        yield f"{core['lost_upcalls']} of them lost"


def _percent(value: float | None) -> str:
    return "not measured" if value is None else f"{value:g} %"

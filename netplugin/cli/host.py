"""The commands ``netplugin backend list|check``, ``pmd show|set`` and ``reconcile``."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from cliff.columns import FormattableColumn
from cliff.lister import Lister
from cliff.show import ShowOne
from pydantic import ValidationError

from netplugin.cli import show
from netplugin.client import Client, invalid_request
from netplugin.models import PmdRequest, PmdState, ReconcileRequest

Columns = tuple[Sequence[str], show.Row]


class BackendList(Lister):
    """List the backends: usable or not, why not, and what they can do."""

    def take_action(self, parsed_args: Namespace) -> tuple[Sequence[str], Iterable[show.Row]]:
        with Client.from_environment() as client:
            backends = client.backends()
        columns = ("name", "usable", "reason", "fix", "features", "facts")
        rows = (backend.model_dump(mode="json") for backend in backends)
        return columns, [
            (
                row["name"], row["usable"], show.Optional(row["reason"]),
                show.Optional(row["fix"]), show.Structure(row["features"]),
                show.Structure(row["facts"]),
            )
            for row in rows
        ]  # fmt: skip


class BackendCheck(Lister):
    """List what the backends found on the host; exit status 1 if something fails."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._status = 0

    def take_action(self, parsed_args: Namespace) -> tuple[Sequence[str], Iterable[show.Row]]:
        with Client.from_environment() as client:
            findings = client.checks()
        self._status = 1 if any(finding.status == "fail" for finding in findings) else 0
        return ("id", "status", "found", "expected", "fix"), [
            (f.id, f.status, f.found, f.expected, show.Optional(f.fix)) for f in findings
        ]

    def run(self, parsed_args: Namespace) -> int:
        return super().run(parsed_args) or self._status


class PmdCores(FormattableColumn[list[dict[str, Any]]]):
    """A line for each PMD thread and each receive queue on it."""

    def human_readable(self) -> str:
        return "\n".join(line for core in self._value for line in self._lines(core))

    def _lines(self, core: dict[str, Any]) -> Iterator[str]:
        isolated = ", isolated" if core["isolated"] else ""
        load = _percent(core["busy_percent"])
        yield f"cpu {core['cpu']} (NUMA node {core['numa_node']}{isolated}): busy {load}"
        for queue in core["queues"]:
            state = "" if queue["enabled"] else " (disabled)"
            used = _percent(queue["usage_percent"])
            yield f"  {queue['port']} queue {queue['queue']}{state}: {used}"


class PmdShow(ShowOne):
    """Show the PMD cores of OVS, their load and their queues."""

    def take_action(self, parsed_args: Namespace) -> Columns:
        with Client.from_environment() as client:
            return _pmd(client.pmd())


class PmdSet(ShowOne):
    """Set the PMD cores of OVS."""

    def get_parser(self, prog_name: str) -> ArgumentParser:
        parser = super().get_parser(prog_name)
        group = parser.add_mutually_exclusive_group(required=True)
        group.add_argument("--cpus", metavar="LIST", help="these CPUs, like 2-5,8")
        group.add_argument("--count", type=int, metavar="N", help="so many, chosen by the agent")
        return parser

    def take_action(self, parsed_args: Namespace) -> Columns:
        try:
            request = PmdRequest(cpus=parsed_args.cpus, count=parsed_args.count)
        except ValidationError as wrong:
            raise invalid_request(wrong) from None
        with Client.from_environment() as client:
            return _pmd(client.set_pmd(request))


class Reconcile(ShowOne):
    """Bring the whole host to what was asked for; exit status 1 if something is left."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._status = 0

    def get_parser(self, prog_name: str) -> ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument("--dry-run", action="store_true", help="show the plan, change nothing")
        parser.add_argument(
            "--remove-orphans",
            action="store_true",
            help="also remove marked ports that nobody asked for, after the agent's store was lost",
        )
        return parser

    def take_action(self, parsed_args: Namespace) -> Columns:
        request = ReconcileRequest(
            dry_run=parsed_args.dry_run, remove_orphans=parsed_args.remove_orphans
        )
        with Client.from_environment() as client:
            report = client.reconcile(request)
        self._status = 1 if report.errors else 0
        return show.fields(report)

    def run(self, parsed_args: Namespace) -> int:
        return super().run(parsed_args) or self._status


def _pmd(state: PmdState) -> Columns:
    values = state.model_dump(mode="json")
    return ("cpus", "cores"), (values["cpus"], PmdCores(values["cores"]))


def _percent(value: float | None) -> str:
    return "not measured" if value is None else f"{value:g} %"

"""What hosts have reported, and whether an object is as desired there (pure)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from netplugin.api.errors import InvalidRequest, NetpluginError, some
from netplugin.api.models import Finding
from netplugin.fleet.errors import HostRefuses, NotAsDesired
from netplugin.fleet.names import Ref
from netplugin.fleet.values import AnyDesired, Fault, Spec, Summary, cluster_name, parsed, root

if TYPE_CHECKING:
    from netplugin.fleet.etcd import KeyValue, Snapshot


@dataclass(frozen=True)
class Report:
    """Of one host, as etcd of ``cluster`` had it at a revision.

    ``unreadable``: keys whose values are not of the models.
    """

    host: str
    cluster: str
    at: int = 0
    is_alive: bool = False
    summary: Summary | None = None
    faults: dict[Ref, Fault] = field(default_factory=dict)
    unreadable: tuple[str, ...] = ()

    @property
    def off(self) -> int:
        """How many objects are not as desired; a host lists some of them only."""
        counts = self.summary.counts.items() if self.summary else ()
        return max(len(self.faults), sum(n for name, n in counts if name not in ("owned", "open")))

    def has_carried_out(self, revision: int) -> bool:
        """Whether the host has seen to all changes up to a revision of this etcd."""
        summary = self.summary
        return summary is not None and summary.cluster == self.cluster and summary.revision >= revision

    def is_verified(self, ref: Ref, revision: int) -> bool:
        """Whether an object is as that revision has it. Raises: HostRefuses, NotAsDesired."""
        refused, fault = self.summary and self.summary.refused, self.faults.get(ref)
        if refused:
            raise HostRefuses(f"{self.host}: {refused.detail}", step="fleet", fix=refused.fix)
        if not self.has_carried_out(revision):
            return False
        if fault is not None:
            cause, fix = (f": {fault.error.detail}", fault.error.fix) if fault.error else ("", None)
            error = NotAsDesired(f"{self.host}: {ref} is {fault.state}{cause}", step="fleet", fix=fix)
            error.state = fault.state
            raise error
        if self.off > len(self.faults) or self.unreadable:
            what = f"of {self.off} objects that are not as desired it lists {len(self.faults)}"
            what = f"{self.unreadable[0]} cannot be read" if self.unreadable else what
            fix = f"repair those of netplugin fleet ports --host {self.host} first"
            raise NotAsDesired(f"{self.host}: the state of {ref} is unknown: {what}", step="fleet", fix=fix)
        return True


def reports(reported: Snapshot, alive: Snapshot, hosts: Collection[str] = ()) -> dict[str, Report]:
    """By host, ``hosts`` among them. What is not of the models, as a host that is taken over may write, is
    ``unreadable``."""
    names = [kv.key.removeprefix(root("reported")).partition("/")[::2] for kv in reported.items]
    living = {kv.key.removeprefix(root("alive")) for kv in alive.items}
    cluster = cluster_name(reported.cluster_id)
    found = {
        host: Report(host, cluster, reported.revision, host in living)
        for host in sorted({*hosts, *living, *(host for host, _ in names)})
    }
    for (host, name), kv in zip(names, reported.items, strict=True):
        try:
            if name == "summary":
                found[host] = replace(found[host], summary=Summary.model_validate_json(kv.value))
            else:
                found[host].faults[Ref.of(name)] = Fault.model_validate_json(kv.value)
        except (ValueError, InvalidRequest):
            found[host] = replace(found[host], unreadable=(*found[host].unreadable, kv.key))
    return found


@dataclass(frozen=True)
class Written:
    """An object as etcd has it. ``revision`` wrote it. ``desired`` is None, with ``error``, for nonsense."""

    host: str
    ref: Ref
    revision: int
    desired: AnyDesired | None
    error: NetpluginError | None = None

    @property
    def generation(self) -> int:
        return self.desired.generation if self.desired else 0

    @property
    def spec(self) -> Spec | None:
        """None: it is to go, or cannot be read."""
        return self.desired.spec if self.desired else None

    @property
    def is_removal(self) -> bool:
        return self.desired is not None and self.desired.deleted


def written(host: str, ref: Ref, revision: int, value: bytes) -> Written:
    try:
        return Written(host, ref, revision, parsed(ref, value))
    except InvalidRequest as wrong:
        return Written(host, ref, revision, None, wrong)


def refs(desired: Iterable[KeyValue]) -> Iterator[tuple[str, Ref, KeyValue]]:
    """The host and the object of each key of ``desired/``; keys of others are passed over."""
    for kv in desired:
        host, _, path = kv.key.removeprefix(root("desired")).partition("/")
        try:
            yield host, Ref.of(path), kv
        except InvalidRequest:
            continue


def standing(report: Report, ref: Ref, there: Written | None) -> tuple[str, str, str | None]:
    """The state of an object on a host, why, and what to do. ``there``: what etcd has; None: no key."""
    revision = there.revision if there else 0
    host, fix = report.host, f"on the host: netplugin port show {ref.id}"
    try:
        if report.is_verified(ref, revision):
            if there is not None and there.is_removal:
                return "removed", "its tombstone is left", f"netplugin fleet drain {host} --port {ref.id}"
            return "verified", "the host has carried it out and read it back", None
    except HostRefuses as refused:
        return "refused", refused.detail, refused.fix or "netplugin fleet status"
    except NotAsDesired as wrong:
        words = _STATES.get(wrong.state, _STATES["failed"])[2]
        words = words.format(host=host, id=ref.id, accept="netplugin fleet status")
        return wrong.state, wrong.detail, wrong.fix or (fix if "explain" in words else words)
    if not report.is_alive:
        return "unreachable", "its agent is not connected to etcd", "netplugin fleet status"
    done = report.summary.revision if report.summary else 0
    return "open", f"revision {revision} wrote it, and the host has carried out those up to {done}", fix


def findings(found: Mapping[str, Report], newest: Mapping[str, int], revision: int) -> Iterator[Finding]:
    """What is wrong, and the next command. ``newest``: the revision of the last change of each host's range.

    ``revision``: that of etcd now, up to which an operator may accept.
    """
    expected = "the host follows this etcd, and each object is as etcd has it"
    for host in sorted({*found, *newest}):
        report = found.get(host, Report(host, ""))
        for what, status, text, fix in _of_host(report, newest.get(host, 0), revision):
            says = {"found": f"{host}: {text}", "expected": expected, "fix": fix}
            yield Finding(id=f"{what}-{host}", status=status, **says)


def _of_host(report: Report, newest: int, revision: int) -> Iterator[tuple[str, _Status, str, str]]:
    host, summary = report.host, report.summary
    done, counts = (summary.revision, summary.counts) if summary else (0, {})
    accept = f"netplugin fleet accept --revision {revision} --host {host}"
    if not report.is_alive:
        text = "its agent is not connected to etcd; its ports stay as they are, and no change reaches them"
        text = text if summary else "etcd has keys for it, and no agent has reported by this name"
        yield "dead", "fail", text, "on the host: netplugin backend check; systemctl status netplugin-agent"
    if report.unreadable:
        text = f"it has written what is no report: {some(report.unreadable)}"
        fix = f"if somebody else has its certificate: netplugin fleet init --remove {host}"
        yield "unreadable", "fail", text, fix
    if summary and summary.refused:
        fix = f"{summary.refused.fix or 'see the log of the agent'}; for this host alone: {accept}"
        yield "refused", "fail", summary.refused.detail, fix
    elif summary and summary.cluster != report.cluster:
        text = f"it has last followed cluster {summary.cluster or 'none'}, and this is {report.cluster}"
        yield "elsewhere", "fail", text, "on the host: compare [fleet] endpoints"
    elif report.is_alive and newest > done:
        text = f"the changes from revision {done} to {newest} are not carried out yet"
        yield "behind", "warn", text, f"netplugin fleet ports --host {host}"
    by_state: dict[str, list[Ref]] = {}
    for ref, fault in sorted(report.faults.items()):
        by_state.setdefault(fault.state if fault.state in _STATES else "failed", []).append(ref)
    for state, those in by_state.items():
        status, text, fix = _STATES[state]
        text = f"{max(len(those), counts.get(state, 0))} {text}: {some([str(ref) for ref in those])}"
        fix = fix.format(host=host, id=those[0].id, accept=accept)
        yield state, status, text, fix


_Status = Literal["fail", "warn"]
_EXPLAIN = "netplugin fleet explain {id}"
_AGAIN = "write it again; or, if it is to go: netplugin fleet drain {host} --port {id}"
#: The states of faults: how bad, in words, and what to do. That of a newer host's, not known here, is failed.
_STATES: dict[str, tuple[_Status, str, str]] = {
    "failed": ("fail", "could not be made so", _EXPLAIN),
    "degraded": ("fail", "do not work as they should", _EXPLAIN),
    "waiting": ("fail", "removals wait, because so many were found at once", "if they are to go: {accept}"),
    "overridden": ("warn", "were changed on the host with --override", "write it again to end that"),
    "unlisted": ("warn", "stay although etcd has no key for them", _AGAIN),
}

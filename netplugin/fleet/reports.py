"""What hosts have reported, and whether an object is as desired there (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from netplugin.api.errors import InvalidRequest, some
from netplugin.api.models import Finding
from netplugin.fleet.errors import HostRefuses, NotAsDesired
from netplugin.fleet.names import Kind, Ref
from netplugin.fleet.values import AnyDesired, Fault, Summary, cluster_name, root

if TYPE_CHECKING:
    from netplugin.fleet.etcd import KeyValue, Snapshot

#: The kinds of which a VM or a service has a NIC.
PORTS = (Kind.PORT, Kind.SERVICE_PORT)


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

    def is_verified(self, ref: Ref, revision: int) -> bool:
        """Whether an object is as that revision has it. Raises: HostRefuses, NotAsDesired."""
        summary = self.summary
        if summary is not None and summary.refused is not None:
            refused = summary.refused
            raise HostRefuses(f"{self.host}: {refused.detail}", step="fleet", fix=refused.fix)
        if summary is None or summary.cluster != self.cluster or summary.revision < revision:
            return False
        fault = self.faults.get(ref)
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


def reports(reported: Snapshot, alive: Snapshot) -> dict[str, Report]:
    """By host. What is not of the models, as a host that is taken over may write, is ``unreadable``."""
    found: dict[str, Report] = {}
    cluster = cluster_name(reported.cluster_id)

    def of(host: str) -> Report:
        return found.setdefault(host, Report(host, cluster, reported.revision))

    for kv in alive.items:
        host = kv.key.removeprefix(root("alive"))
        found[host] = replace(of(host), is_alive=True)
    for kv in reported.items:
        host, _, name = kv.key.removeprefix(root("reported")).partition("/")
        try:
            if name == "summary":
                found[host] = replace(of(host), summary=Summary.model_validate_json(kv.value))
            else:
                of(host).faults[Ref.of(name)] = Fault.model_validate_json(kv.value)
        except (ValueError, InvalidRequest):
            found[host] = replace(of(host), unreadable=(*of(host).unreadable, kv.key))
    return dict(sorted(found.items()))


def refs(desired: Iterable[KeyValue]) -> Iterator[tuple[str, Ref, KeyValue]]:
    """The host and the object of each key of ``desired/``; keys of others are passed over."""
    for kv in desired:
        host, _, path = kv.key.removeprefix(root("desired")).partition("/")
        try:
            yield host, Ref.of(path), kv
        except InvalidRequest:
            continue


def standing(
    report: Report, ref: Ref, revision: int | None, desired: AnyDesired | None
) -> tuple[str, str, str | None]:
    """The state of an object on a host, why, and what to do. ``revision`` wrote it; None: etcd has no key."""
    host, fix = report.host, f"on the host: netplugin port show {ref.id}"
    try:
        if report.is_verified(ref, revision or 0):
            if desired is not None and desired.deleted:
                return "removed", "its tombstone is left", f"netplugin fleet drain {host} --port {ref.id}"
            return "verified", "the host has carried it out and read it back", None
    except HostRefuses as refused:
        return "refused", refused.detail, refused.fix or "netplugin fleet status"
    except NotAsDesired as wrong:
        words = _meaning(wrong.state)[2].format(host=host, id=ref.id)
        return wrong.state, wrong.detail, wrong.fix or words or fix
    if not report.is_alive:
        return "unreachable", "its agent is not connected to etcd", "netplugin fleet status"
    done = report.summary.revision if report.summary else 0
    return "open", f"revision {revision} wrote it, and the host has carried out those up to {done}", fix


def findings(found: Mapping[str, Report], newest: Mapping[str, int], revision: int) -> Iterator[Finding]:
    """What is wrong, and the next command. ``newest``: the revision of the last change of each host's range.

    ``revision``: that of etcd now, up to which an operator may accept.
    """
    for host in sorted({*found, *newest}):
        for what, status, text, fix in _of_host(
            found.get(host, Report(host, "")), newest.get(host, 0), revision
        ):
            text, expected = (
                f"{host}: {text}",
                "the host follows this etcd, and each object is as etcd has it",
            )
            yield Finding(id=f"{what}-{host}", status=status, found=text, expected=expected, fix=fix)


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
        status, text, fix = _meaning(state)
        text = f"{max(len(those), counts.get(state, 0))} {text}: {some([str(ref) for ref in those])}"
        fix = f"if they are to go: {accept}" if state == "waiting" else fix.format(host=host, id=those[0].id)
        yield state, status, text, fix or f"netplugin fleet explain {those[0].id}"


_Status = Literal["fail", "warn"]
#: The states of faults: how bad, in words, and what to do.
_STATES: dict[str, tuple[_Status, str, str]] = {
    "failed": ("fail", "could not be made so", ""),
    "degraded": ("fail", "do not work as they should", ""),
    "waiting": ("fail", "removals wait, because so many were found at once", "netplugin fleet status"),
    "overridden": ("warn", "were changed on the host with --override", "write it again to end that"),
    "unlisted": (
        *("warn", "stay although etcd has no key for them"),
        "write it again; or, if it is to go: netplugin fleet drain {host} --port {id}",
    ),
}


def _meaning(state: str) -> tuple[_Status, str, str]:
    """That of a newer host's state, which is not known here, is ``failed``."""
    return _STATES.get(state, _STATES["failed"])

"""OpenFlow flows of an OVS bridge: read in the syntax of ovs-ofctl, written in atomic bundles."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from netplugin.api.errors import BackendUnavailable, HostError
from netplugin.host.ovs_sockets import OvsSockets
from netplugin.host.processes import run

# Our cookies begin with "np"; the other 48 bits identify the owner of the flow.
COOKIE_MARK = 0x6E70 << 48
_MARK_MASK = 0xFFFF << 48
_ALL = (1 << 64) - 1
_MATCHED = "nx-match"

_NO_MATCH = re.compile(
    r"(?:idle_timeout|hard_timeout|importance)=|"
    r"(?:send_flow_rem|check_overlap|reset_counts|no_packet_counts|no_byte_counts)$"
)
_LINE = re.compile(r"^\s*cookie=0x([0-9a-f]+), (?:(.*) )?actions=(\S*)$")


@dataclass(frozen=True, slots=True)
class Flow:
    """One flow. The fields of ``match`` are sorted, so equal flows compare equal."""

    cookie: int
    priority: int
    match: str
    actions: str

    @staticmethod
    def make(cookie: int, priority: int, match: str, actions: str = "NORMAL") -> Flow:
        return Flow(cookie, priority, ",".join(sorted(filter(None, match.split(",")))), actions)

    @property
    def identity(self) -> tuple[int, str]:
        """Priority and match without timeouts and flags: unique within a table."""
        words = (word for word in self.match.split(",") if not _NO_MATCH.match(word))
        return self.priority, ",".join(words)


def parse_flows(text: str) -> list[Flow]:
    """Parse the output of ``ovs-ofctl --no-stats dump-flows``.

    Everything but the priority stays in ``match``, including ``table=5``, ``reset_counts`` or
    ``idle_timeout=9``: our flows have none of these, so such a flow differs from ours.
    """
    flows = []
    for line in text.splitlines():
        found = _LINE.match(line)
        if found:
            cookie, middle, actions = found.groups()
            words = re.split(r"[,\s]+", middle or "")
            priority = next((w for w in words if w.startswith("priority=")), "priority=32768")
            match = ",".join(w for w in words if w != priority)
            flows.append(Flow.make(int(cookie, 16), int(priority[9:]), match, actions))
    return flows


class OpenFlow:
    """Runs ovs-ofctl on the management sockets of the bridges of one vswitchd."""

    def __init__(
        self, sockets: OvsSockets, gone: Callable[[], BackendUnavailable | None] = lambda: None
    ) -> None:
        """``gone`` says why vswitchd is not there; None if it is."""
        self._sockets = sockets
        self._gone = gone

    def dump(self, bridge: str, owner: int | None, deadline: float, without: int = 0) -> list[Flow]:
        """List our flows on the bridge: all, or those of the cookie ``owner`` and of the bridge.

        Flows whose cookie has one of the bits ``without`` are left out.

        Raises: BackendUnavailable, HostError, OperationTimeout.
        """
        # A request has one cookie and one mask. A mask without the bits of the port's cookie
        # selects the port's flows and the bridge's own, whose bits are all clear.
        mask = _MARK_MASK if owner is None else _ALL & ~(owner & ~_MARK_MASK)
        text = self._ofctl(
            [
                "--no-stats",
                "--no-names",
                "dump-flows",
                self._target(bridge),
                f"cookie={COOKIE_MARK:#x}/{mask | without:#x}",
            ],
            deadline,
        )
        wanted = (COOKIE_MARK, owner)
        return [f for f in parse_flows(text) if owner is None or f.cookie in wanted]

    def replace(
        self,
        bridge: str,
        cookies: Iterable[int],
        flows: Iterable[Flow],
        deadline: float,
        gone: Iterable[Flow] = (),
    ) -> None:
        """Delete flows by cookie and the flows ``gone``, and add ``flows``, in one atomic bundle.

        Raises: BackendUnavailable, HostError, OperationTimeout.
        """
        lines = [f"delete cookie={cookie:#x}/-1" for cookie in sorted(set(cookies))]
        for flow in gone:
            priority, match = flow.identity
            lines.append(f"delete_strict cookie={flow.cookie:#x}/-1,priority={priority},{match}")
        lines += [
            f"add cookie={flow.cookie:#x},priority={flow.priority},{flow.match},actions={flow.actions}"
            for flow in sorted(flows, key=lambda f: (f.cookie, -f.priority, f.match))
        ]
        self._ofctl(["--bundle", "add-flows", self._target(bridge), "-"], deadline, "\n".join(lines) + "\n")

    def match_fragments(self, bridge: str, deadline: float) -> None:
        """Match L4 ports and ICMP types of first fragments, which OVS matches as zeros by default.

        The setting lasts until vswitchd ends or the bridge is deleted ("set-frags" in
        ovs-ofctl(8)), and is verified by ovs-ofctl.

        Raises: BackendUnavailable, HostError, OperationTimeout.
        """
        self._ofctl(["set-frags", self._target(bridge), _MATCHED], deadline)

    def matches_fragments(self, bridge: str, deadline: float) -> bool:
        """Whether ``match_fragments`` is in effect.

        Raises: BackendUnavailable, HostError, OperationTimeout.
        """
        return self._ofctl(["get-frags", self._target(bridge)], deadline).strip() == _MATCHED

    def dump_ports(self, bridge: str, deadline: float) -> str:
        """The output of ``ovs-ofctl dump-ports``, with port names and custom statistics.

        These counters are current; the statistics in the database are up to seconds old.

        Raises: BackendUnavailable, HostError, OperationTimeout.
        """
        return self._ofctl(["--names", "dump-ports", self._target(bridge)], deadline)

    def _target(self, bridge: str) -> str:
        return f"unix:{self._sockets.management(bridge)}"

    def _ofctl(self, args: list[str], deadline: float, stdin: str | None = None) -> str:
        try:
            return run(
                ["ovs-ofctl", "-O", "OpenFlow14", *args],
                step="openflow",
                deadline=deadline,
                stdin=stdin,
            )
        except HostError as failed:
            # ovs-ofctl says no more than that it could not connect.
            if (gone := self._gone()) is not None:
                raise gone from failed
            raise

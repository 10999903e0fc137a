"""Flows of an OVS bridge: read in ovs-ofctl's own words, written in atomic bundles."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from netplugin.host.processes import run

# Our cookies begin with "np"; the rest tells whose the flow is.
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
    """One flow. ``match`` has its fields sorted, so that equal flows are equal values."""

    cookie: int
    priority: int
    match: str
    actions: str

    @staticmethod
    def make(cookie: int, priority: int, match: str, actions: str = "NORMAL") -> Flow:
        return Flow(cookie, priority, ",".join(sorted(filter(None, match.split(",")))), actions)

    @property
    def identity(self) -> tuple[int, str]:
        """What a bridge has one flow of in a table: priority and match, without timeouts and flags."""
        words = (word for word in self.match.split(",") if not _NO_MATCH.match(word))
        return self.priority, ",".join(words)


def parse_flows(text: str) -> list[Flow]:
    """The flows in the output of ``ovs-ofctl --no-stats dump-flows``.

    What is no priority stays in ``match``, words that are no match too (``table=5``,
    ``reset_counts``, ``idle_timeout=9``): a flow that has one is not as we made it.
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
    """ovs-ofctl on the management sockets of the bridges in one run directory."""

    def __init__(self, rundir: Path) -> None:
        self._rundir = rundir

    def dump(self, bridge: str, owner: int | None, deadline: float, without: int = 0) -> list[Flow]:
        """Our flows on the bridge: all, or those of the cookie ``owner`` and of the bridge itself.

        Flows whose cookies have one of the bits ``without`` are left out.

        Raises: HostError, OperationTimeout.
        """
        # One request can ask for one cookie under a mask. Masking out the bits that are set in the
        # port's cookie leaves it and the bridge's own (whose bits are all clear): what both need.
        mask = _MARK_MASK if owner is None else _ALL & ~(owner & ~_MARK_MASK)
        text = self._ofctl(
            ["--no-stats", "--no-names", "dump-flows", self._target(bridge),
             f"cookie={COOKIE_MARK:#x}/{mask | without:#x}"],
            deadline,
        )  # fmt: skip
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
        """In one atomic bundle: the flows of these cookies and those ``gone`` go, the given ones come.

        Raises: HostError, OperationTimeout.
        """
        lines = [f"delete cookie={cookie:#x}/-1" for cookie in sorted(set(cookies))]
        for flow in gone:
            priority, match = flow.identity
            lines.append(f"delete_strict cookie={flow.cookie:#x}/-1,priority={priority},{match}")
        lines += [
            f"add cookie={flow.cookie:#x},priority={flow.priority},{flow.match},actions={flow.actions}"
            for flow in sorted(flows, key=lambda f: (f.cookie, -f.priority, f.match))
        ]
        self._ofctl(
            ["--bundle", "add-flows", self._target(bridge), "-"], deadline, "\n".join(lines) + "\n"
        )

    def match_fragments(self, bridge: str, deadline: float) -> None:
        """Have flows see the ports and types that first fragments hold; OVS shows them zeros else.

        It is the bridge's until vswitchd ends, or the bridge does ("set-frags" in ovs-ofctl(8), which
        reads it back).

        Raises: HostError, OperationTimeout.
        """
        self._ofctl(["set-frags", self._target(bridge), _MATCHED], deadline)

    def matches_fragments(self, bridge: str, deadline: float) -> bool:
        """Raises: HostError, OperationTimeout."""
        return self._ofctl(["get-frags", self._target(bridge)], deadline).strip() == _MATCHED

    def dump_ports(self, bridge: str, deadline: float) -> str:
        """What ``ovs-ofctl dump-ports`` prints, each port by its name, with its own kind's counters.

        They are those of this moment; the statistics in the database are up to seconds old.

        Raises: HostError, OperationTimeout.
        """
        return self._ofctl(["--names", "dump-ports", self._target(bridge)], deadline)

    def _target(self, bridge: str) -> str:
        return f"unix:{self._rundir / (bridge + '.mgmt')}"

    def _ofctl(self, args: list[str], deadline: float, stdin: str | None = None) -> str:
        return run(
            ["ovs-ofctl", "-O", "OpenFlow14", *args],
            step="openflow",
            deadline=deadline,
            stdin=stdin,
        )

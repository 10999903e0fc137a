"""A host as the system's own tools tell it, without what differs from run to run: two can be compared.

Nothing of the agent's code is used here: rows by ovsdb-client, flows by ovs-ofctl, links, queues, tables
and filters by ip, bridge, tc and nft, files by the kernel, the store by SQLite.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from drivers.ovs.remains import ASIDE
from tests.lab.namespaces import within
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import run

#: How long the agent may take to remove what is aside, seconds; then it counts as left.
_CLEARED_S = 60.0
#: A line for each thing that is there.
State = frozenset[str]

_STORED = {
    "ports": "port_id, backend, spec, state, standby_of",
    "networks": "network_id, vni, spec",
    "physical_networks": "name, spec",
    "claims": "kind, key, port_id",
    "quarantine": "kind, key",
    "set_aside": "kind, key",
}
_COUNTED_COLUMNS = {
    "": {"_uuid", "_version", "statistics", "status"},
    "Interface": {
        "admin_state", "duplex", "ifindex", "link_resets", "link_speed", "link_state", "mac_in_use", "ofport",
    },
    "Bridge": {"datapath_id", "rstp_status"},
    "Open_vSwitch": {"cur_cfg", "next_cfg", "manager_options", "external_ids"},
}  # fmt: skip
_COUNTED_OF_LINKS = {
    "ifindex", "link_index", "operstate", "flags", "link", "stats", "stats64", "qdisc", "root_id",
    "bridge_id",
    "hello_timer", "tcn_timer", "topology_change_timer", "gc_timer", "designated_root", "designated_bridge",
    "message_age_timer", "forward_delay_timer", "hold_timer", "root_port", "id", "port_id", "port_no", "no",
    "topology_change", "topology_change_detected", "designated_port", "state", "backup_port",
    "parentbus", "parentdev",
}  # fmt: skip
#: The identity of the store, the number of a commit, which grows, and the run of the agent that made it.
_OF_STORE = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}/[0-9]+(/[0-9a-f]{16})?")
_NUMBERED = re.compile(r'"handle": ?\d+,? ?|"packets": ?\d+,? ?|"bytes": ?\d+,? ?')
#: SQLite makes and removes these when it likes.
_OF_SQLITE = re.compile(r"-(wal|shm|journal)$|\.agent-.*new|backups")


def compared(*lines: Iterable[str]) -> State:
    """The state made of these lines."""
    return frozenset(_OF_STORE.sub("(store)", line) for part in lines for line in part)


def of_ovs(ovs: PrivateOvs) -> Iterator[str]:
    """Every row and every flow."""
    tables = [json.loads(line) for line in ovs.dbclient("dump", "-f", "json").splitlines() if line.strip()]
    named = {}
    rows = []
    for table in tables:
        kind = table["caption"].split()[0]
        for values in table["data"]:
            row = dict(zip(table["headings"], values, strict=True))
            rows.append((kind, row))
            if "_uuid" in row:
                named[row["_uuid"][1]] = f"{kind} {row.get('name', row.get('target', ''))}"
    for kind, row in rows:
        counted = _COUNTED_COLUMNS[""] | _COUNTED_COLUMNS.get(kind, set())
        kept = {name: _plain(value, named) for name, value in row.items() if name not in counted}
        yield f"row {kind} {json.dumps(kept, sort_keys=True)}"
    for bridge in sorted(row["name"] for kind, row in rows if kind == "Bridge"):
        flows = ovs.ofctl("-O", "OpenFlow14", "--names", "--no-stats", "dump-flows", bridge)
        for flow in flows.splitlines():
            yield f"flow {bridge} {flow.strip()}"


def _plain(value: Any, named: Mapping[str, str]) -> Any:
    """A value in which references are names, and sets and maps are in order."""
    if not isinstance(value, list):
        return value
    if len(value) == 2 and value[0] == "uuid":
        return named.get(value[1], "?")
    if len(value) == 2 and value[0] in ("set", "map"):
        return [value[0], sorted((_plain(each, named) for each in value[1]), key=json.dumps)]
    return [_plain(each, named) for each in value]


def _tool(netns: str | None, *command: str) -> Any:
    return json.loads(run(within(netns, command)) or "[]")


def of_links(netns: str | None = None, without: Sequence[str] = ()) -> Iterator[str]:
    """Every link and nftables rule of a network namespace; ``without`` are devices that others change."""
    for link in _tool(netns, "ip", "-j", "-d", "link", "show"):
        if link and link["ifname"] not in without:
            yield f"link {json.dumps(_steady(link, link), sort_keys=True)}"
    for rule in _tool(netns, "nft", "-j", "list", "ruleset")["nftables"]:
        if "metainfo" not in rule:
            yield "nft " + _NUMBERED.sub("", json.dumps(rule))


def of_bridges(netns: str | None = None) -> Iterator[str]:
    """What Linux bridges, VXLAN devices and queues have of a network namespace."""

    def tool(*command: str) -> Any:
        return _tool(netns, *command)

    for member in tool("bridge", "-j", "-d", "link", "show"):
        yield f"member {json.dumps(_steady(member, member), sort_keys=True)}"
    for entry in tool("bridge", "-j", "fdb", "show"):
        if entry.get("state") in ("permanent", "static") and "dst" in entry:
            yield f"entry {json.dumps(entry, sort_keys=True)}"
    for vlan in tool("bridge", "-j", "vlan", "show"):
        yield f"vlan {json.dumps(vlan, sort_keys=True)}"
    for queue in tool("tc", "-j", "qdisc", "show"):
        if queue.get("kind") in ("noqueue", "mq", "fq_codel", "pfifo_fast"):
            continue  # the kernel's own
        kept = {key: value for key, value in queue.items() if key not in ("refcnt", "handle", "parent")}
        yield f"queue {json.dumps(kept, sort_keys=True)}"
        if queue["kind"] in ("ingress", "clsact"):
            for chain in ("ingress", "egress") if queue["kind"] == "clsact" else ("ingress",):
                text = run(within(netns, ["tc", "-j", "filter", "show", "dev", queue["dev"], chain]))
                yield f"filters {queue['dev']} {chain} {_rates(text)}"


def _steady(value: Any, link: Mapping[str, Any]) -> Any:
    if isinstance(value, list):
        return [_steady(each, link) for each in value]
    if not isinstance(value, dict):
        return value
    kept = {key: _steady(each, link) for key, each in value.items() if key not in _COUNTED_OF_LINKS}
    kind = link.get("linkinfo", {}).get("info_kind")
    if kind in ("tun", "bridge", "ifb") and not str(link.get("ifname", "")).startswith("theirs"):
        kept.pop("address", None)  # a bridge takes its members', the kernel invents the others
    return kept


def _rates(text: str) -> str:
    return ",".join(sorted(set(re.findall(r'"(?:rate|burst|kind|prio|mtu)": ?[^,}]*', text))))


def wait_until_cleared(aside: Path) -> None:
    """Wait for the agent's thread that removes what has been moved aside, as long as it may take."""
    deadline = time.monotonic() + _CLEARED_S
    while aside.exists() and any(aside.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)


def of_files(*directories: Path) -> Iterator[str]:
    """Every file, directory and socket below these, with owner and rights."""
    for directory in directories:
        for place, names, files in os.walk(directory):
            for name in (*names, *files):
                path = Path(place) / name
                if _OF_SQLITE.search(str(path)) or (name == ASIDE and not any(path.iterdir())):
                    continue
                found = path.lstat()
                yield f"file {path} {found.st_mode:o} {found.st_uid}:{found.st_gid}"


def of_store(path: Path) -> Iterator[str]:
    """The intents and all that they have claimed."""
    with tempfile.TemporaryDirectory() as directory:
        store = _opened(path, Path(directory))
        try:
            for table, columns in _STORED.items():
                for row in store.execute(f"SELECT {columns} FROM {table}"):
                    yield f"stored {table} {row}"
        finally:
            store.close()


def _opened(path: Path, directory: Path) -> sqlite3.Connection:
    """The store; or a copy of its files, which an agent keeps locked if SQLite could not share them.

    The agent writes nothing while it is copied, as it has settled.
    """
    store = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=3)
    try:
        store.execute("SELECT 1 FROM sqlite_master").fetchone()
    except sqlite3.OperationalError as locked:
        store.close()
        if locked.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
            raise
        for name in (path.name, f"{path.name}-wal"):
            with contextlib.suppress(FileNotFoundError):
                shutil.copy(path.with_name(name), directory)
        return sqlite3.connect(directory / path.name)
    return store


def differences(expected: State, found: State) -> str:
    """What is missing and what is there in addition, a line for each; empty if they are equal.

    Of two lines that are nearly the same only what differs is shown.
    """
    lines = []
    additional = sorted(found - expected)
    for line in sorted(expected - found):
        parts = line.split(", ")
        near = max(additional, key=lambda other: _common(parts, other.split(", ")), default="")
        if _common(parts, near.split(", ")) * 2 > len(parts):
            additional.remove(near)
            was, now = set(parts) - set(near.split(", ")), set(near.split(", ")) - set(parts)
            lines.append(f"  {parts[0][:60]}...: expected {sorted(was)}, found {sorted(now)}")
        else:
            lines.append(f"  missing: {line}")
    return "\n".join(lines + [f"  in addition: {line}" for line in additional])


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    return len(set(one) & set(other))

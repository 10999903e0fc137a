"""The store of ports: intents, claims, and the VXLAN networks.

An intent is committed with its claims, in one transaction, before the host is changed.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from agents.store.database import Database
from agents.store.event_log import EventLog, NewEvent
from agents.store.fleet import FleetStore
from agents.store.marks import StoreMarks
from agents.store.physical_networks import StoredPhysicalNetworks
from agents.store.placements import Placements
from agents.store.port_table import ClaimMoves, Parts, PortTable, Record, leaves_vm, port_events, without
from agents.store.set_aside import Row, SetAside
from agents.store.task_journal import TaskJournal
from netplugin import store_file
from netplugin.api.conditions import intent_tag
from netplugin.api.errors import CapacityExhausted, Conflict, HostError, some
from netplugin.api.event_models import EventKind
from netplugin.api.models import Finding, NetworkSpec, PortState
from netplugin.backend import NOBODY, Claim, Overlay
from netplugin.host.names import name_digits
from netplugin.libvirt.pins import Placement

# IEEE 802.1Q, table 9-2: 0 is no VLAN and 4095 is reserved.
_LOCAL_VLANS = range(1, 4095)
# Maximum number of remembered deleted ports; older ones are dropped.
_FORGOTTEN = 20_000


class Store:
    """One file, one connection, one writer at a time.

    Any thread reads ports, networks and claims from memory without waiting for a writer: a commit
    replaces the tables, which are immutable.
    """

    def __init__(
        self,
        path: Path,
        max_tasks: int = 100_000,
        max_task_bytes: int = 256 << 20,
        max_events: int = 10_000,
    ) -> None:
        """Open or create the file. Raises: sqlite3.Error, OSError, ValueError for a newer version."""
        self.database = Database(path)
        self.tasks = TaskJournal(self.database, max_tasks, max_task_bytes)
        self.placements = Placements(self.database)
        self.events = EventLog(self.database, max_events)
        self._lock = self.database.lock
        self.set_aside = SetAside(self.database)
        #: Created with the store, and written to every port that it makes.
        self.identity = self.database.identity
        self.marks = StoreMarks(self.database, self.events)
        #: The commit number of each port's record.
        self._numbers: dict[str, int] = {}
        self._ports = PortTable(self._read_ports())
        self._networks = {n.network_id: n for n in self.set_aside.sift("networks", _network_of)}
        self.physical_networks = StoredPhysicalNetworks(self.database, self.set_aside, self.events)
        self.fleet = FleetStore(self.database, self.set_aside)
        self._unfit: dict[Claim, str] = dict(
            self.set_aside.sift("quarantine", lambda row: (Claim(row["kind"], row["key"]), row["reason"]))
        )
        self.set_aside.sift("placements", lambda row: Placement.model_validate_json(row["placement"]))
        self.set_aside.sift("tasks", lambda row: self.tasks.get(row["taskuuid"]))
        self._moves = ClaimMoves()

    def close(self) -> None:
        self.database.close()

    # -- ports -----------------------------------------------------------------------------------

    def get(self, port_id: str) -> Record | None:
        return self._ports.get(port_id)

    def records(
        self, *, backend: str | None = None, vm_id: str | None = None, network: str | None = None
    ) -> list[Record]:
        """The ports with all given values; ``network``: a physical network or a VXLAN network."""
        return [
            r
            for r in self._ports.all()
            if backend in (None, r.spec.backend)
            and vm_id in (None, r.spec.vm_id)
            and network in (None, r.spec.network.physical_network, r.spec.network.network_id)
        ]

    def any_in(self, backend: str, *states: PortState) -> bool:
        """Whether a port of this backend is in one of these states."""
        return self._ports.any_in(backend, states)

    def show(self, records: Collection[Record]) -> None:
        """Give these records to readers before ``save`` commits them: see ``PortTable.show``."""
        self._ports.show(records)

    def save(self, records: Iterable[Record], forget: Collection[str] = ()) -> None:
        """Commit these records with their claims, and delete those ports, in one transaction.

        Raises: Conflict if two ports claim the same resource or would have devices of the same name, or
        if a network was deleted meanwhile; HostError if the file cannot be written. Then nothing is
        changed.
        """
        records = list(records)
        with self._lock:
            self._require_networks(records)
            self._require_names(records)
            before = {i: self._ports.committed(i) for i in (*forget, *(r.port_id for r in records))}
            with self.database.transaction():
                commit = self.marks.commits.write_next()
                for port_id in forget:
                    self._forget(port_id)
                for record in records:
                    self._write(record, self._numbers.get(record.port_id, commit))
                    self.set_aside.forget("ports", record.port_id)
                if leaves_vm(before, records):
                    # Delete the placement of a VM with its last port.
                    self.database.sql.execute(
                        "DELETE FROM placements WHERE vm_id NOT IN (SELECT vm_id FROM ports)"
                    )
                events = port_events(before, records)
                self.events.write(events)
            self.marks.commits.made(commit)
            new = {record.port_id for record in records}
            # Before the records, so that a reader that finds a record finds its number.
            if forget or not new <= self._numbers.keys():
                self._numbers = dict.fromkeys(new, commit) | without(self._numbers, forget)
            self._ports.replace(records, forget)
            self.set_aside.forgotten("ports", new)
            self._moves.note(before, self._ports.get)
        if events:
            self.events.announce()

    def save_each(self, records: Iterable[Record], forget: Collection[str] = ()) -> dict[str, Exception]:
        """As ``save``, but if it fails, try its parts, so that each port has an error of its own only.

        Returns the ports that were not saved, with the errors: all of them if the file cannot be written.
        """
        new = {record.port_id: record for record in records}
        ports = [*new, *forget]
        if not ports:
            return {}
        try:
            self.save(new.values(), forget)
        except Exception as error:
            if isinstance(error, HostError) or len(ports) == 1:
                return dict.fromkeys(ports, error)
            middle = len(ports) // 2
            failed: dict[str, Exception] = {}
            for part in (ports[:middle], ports[middle:]):
                failed |= self.save_each(
                    [new[i] for i in part if i in new], [i for i in part if i not in new]
                )
            return failed
        return {}

    def _forget(self, port_id: str) -> None:
        number = self._numbers.get(port_id)
        if number is None:
            return
        self.database.sql.execute("DELETE FROM ports WHERE port_id = ?", (port_id,))
        self.database.sql.execute("INSERT OR IGNORE INTO forgotten VALUES (?, ?)", (port_id, number))
        self.database.sql.execute(
            "DELETE FROM forgotten WHERE rowid <= (SELECT MAX(rowid) FROM forgotten) - ?",
            (_FORGOTTEN,),
        )

    # -- stamps of ports on the host -------------------------------------------------------------

    def stamp(self, port_id: str) -> str:
        """The stamp of a port on the host: the identity of this store and the commit of its record.

        A port that is PUT again after its deletion has a new stamp. Empty without a record.
        """
        number = self._numbers.get(port_id)
        return "" if number is None else f"{self.identity}/{number}"

    def intent_tag(self, record: Record | None) -> str | None:
        """The part of a port's entity tag that stands for what was requested; None for no port."""
        return None if record is None else intent_tag(record.spec, self.stamp(record.port_id))

    def has_forgotten(self, port_id: str, stamp: str) -> bool:
        """Whether the stamp is that of a port that this store has deleted."""
        identity, _, number = stamp.partition("/")
        if identity != self.identity:
            return False
        with self._lock:
            found = self.database.sql.execute(
                "SELECT 1 FROM forgotten WHERE port_id = ? AND number = ?", (port_id, number)
            )
            return found.fetchone() is not None

    def claims_before(self, port_id: str) -> tuple[Claim, ...]:
        """The claims in the unreadable row of a port without a record."""
        aside = self.set_aside.get("ports", port_id)
        return () if aside is None or port_id in self._ports else aside.claims

    # -- claims and quarantines ------------------------------------------------------------------

    def claims(self) -> dict[Claim, str]:
        """The owner of each claim; quarantined resources without a port belong to ``NOBODY``."""
        had = self._ports.owners
        held = {c: a.key for a in self.set_aside.all() for c in a.claims if c not in had} | dict(had)
        return {c: NOBODY for c in self._unfit if c not in held} | held

    def claimed(self, kind: str) -> Mapping[str, tuple[str, Mapping[str, Any]]]:
        """Key and memory of the claim of this kind that each port has; also while it is being removed."""
        return self._ports.claimed(kind)

    def commit_sequence(self) -> int:
        """The current commit sequence: get it before observing the host, and pass it to ``claiming``."""
        return self._moves.count

    @contextmanager
    def claiming(self, looked_at: int) -> Iterator[dict[Claim, str]]:
        """Lock the claims while some are chosen and saved. Yields the owner of each claim.

        Resources that changed their owner since ``looked_at`` may differ from the observation and
        belong to ``NOBODY``.
        """
        with self._lock:
            held = self.claims()
            yield {c: NOBODY for c in self._moves.since(looked_at) if c not in held} | held

    def quarantine(self, unfit: Mapping[Claim, str]) -> None:
        """Quarantine these resources: no port gets them any more. An earlier reason is kept."""
        if unfit.keys() <= self._unfit.keys():
            return  # the common case: avoid waiting for a slow disk
        with self._lock:
            new = {claim: reason for claim, reason in unfit.items() if claim not in self._unfit}
            begun = [NewEvent(EventKind.QUARANTINE, "begun", why, subject=c.key) for c, why in new.items()]
            with self.database.transaction():
                self.database.sql.executemany(
                    "INSERT OR IGNORE INTO quarantine VALUES (?, ?, ?)",
                    [(claim.kind, claim.key, reason) for claim, reason in new.items()],
                )
                self.events.write(begun)
            self._unfit = {**new, **self._unfit}
            self.events.announce()

    def release(self, claims: Collection[Claim]) -> None:
        """End the quarantine of these resources."""
        with self._lock:
            ended = [c for c in self._unfit if c in set(claims)]
            with self.database.transaction():
                self.database.sql.executemany(
                    "DELETE FROM quarantine WHERE kind = ? AND key = ?",
                    [(claim.kind, claim.key) for claim in claims],
                )
                self.events.write([NewEvent(EventKind.QUARANTINE, "ended", subject=c.key) for c in ended])
            self.events.announce()
            self._unfit = {c: reason for c, reason in self._unfit.items() if c not in ended}

    def unfit(self) -> dict[Claim, str]:
        """The quarantined resources, with the reasons."""
        return dict(self._unfit)

    # -- reading and writing ports ---------------------------------------------------------------

    def _require_networks(self, records: Iterable[Record]) -> None:
        for record in records:
            known = self._ports.get(record.port_id)
            if known is None or known.spec.network != record.spec.network:
                self.physical_networks.require(record.port_id, record.spec)
            network_id = record.spec.overlay_id
            if network_id is not None and network_id not in self._networks:
                raise Conflict(
                    f"network {network_id} was deleted meanwhile",
                    step="store",
                    port_id=record.port_id,
                    fix=f"PUT /v1/networks/{network_id} again",
                )

    def _require_names(self, records: Iterable[Record]) -> None:
        came: dict[str, str] = {}
        for port_id in (r.port_id for r in records if r.port_id not in self._ports):
            other = self._ports.namesake(port_id) or came.get(name_digits(port_id))
            if other is not None:
                raise Conflict(
                    f"the devices of this port would have the names of those of port {other}",
                    step="store",
                    port_id=port_id,
                    fix="choose another port id",
                )
            came[name_digits(port_id)] = port_id

    def _write(self, record: Record, number: int) -> None:
        before = self._ports.committed(record.port_id)
        self.database.sql.execute(
            "INSERT INTO ports (port_id, backend, vm_id, spec, previous_spec, state, error, timings, "
            "standby_of, number, migration) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (port_id) DO UPDATE SET "
            "backend=excluded.backend, vm_id=excluded.vm_id, spec=excluded.spec, "
            "previous_spec=excluded.previous_spec, state=excluded.state, error=excluded.error, "
            "timings=excluded.timings, standby_of=excluded.standby_of, migration=excluded.migration",
            (
                record.port_id,
                record.spec.backend,
                record.spec.vm_id,
                record.spec.model_dump_json(),
                record.previous.model_dump_json() if record.previous else None,
                record.state.value,
                record.error.model_dump_json() if record.error else None,
                json.dumps(record.timings_ms or {}),
                record.standby_of,
                number,
                record.migration.model_dump_json() if record.migration else None,
            ),
        )
        if before is None or before.claims != record.claims:
            self.database.sql.execute("DELETE FROM claims WHERE port_id = ?", (record.port_id,))
            for claim in record.claims:
                row = (claim.kind, claim.key, record.port_id, json.dumps(claim.memory))
                try:
                    self.database.sql.execute(
                        "INSERT INTO claims (kind, key, port_id, memory) VALUES (?, ?, ?, ?)", row
                    )
                except sqlite3.IntegrityError as taken:
                    raise Conflict(
                        f"{claim.kind} {claim.key} belongs to another port",
                        step="store",
                        port_id=record.port_id,
                        fix="see GET /v1/ports for the port that has it",
                    ) from taken

    def _read_ports(self) -> list[Record]:
        rows: dict[str, list[tuple[str, str, str]]] = {}
        parts = Parts()
        held = self.database.sql.execute("SELECT kind, key, port_id, memory FROM claims")
        for kind, key, port_id, memory in held:
            rows.setdefault(port_id, []).append((kind, key, memory))

        def parse(row: Row) -> Record:
            port_id = row["port_id"]
            claims = [Claim(kind, key, json.loads(m)) for kind, key, m in rows.get(port_id, ())]
            record = parts.record_of(row, tuple(sorted(claims, key=lambda c: (c.kind, c.key))))
            self._numbers[port_id] = int(row["number"])
            return record

        return self.set_aside.sift("ports", parse, lambda row: {"claims": rows.get(row["port_id"], [])})

    # -- networks --------------------------------------------------------------------------------

    def network(self, network_id: str | None) -> Overlay | None:
        return self._networks.get(network_id or "")

    def networks(self) -> list[Overlay]:
        return sorted(self._networks.values(), key=lambda network: network.network_id)

    def ports_on(self, network_id: str) -> list[Record]:
        """The ports on this network, including those that are being removed."""
        return [
            r
            for r in self._ports.all()
            if network_id in (r.spec.overlay_id, r.previous and r.previous.overlay_id)
        ]

    def ports_by_network(self) -> Counter[str]:
        """The number of ports on each VXLAN network, as ``ports_on`` counts them."""
        specs = ((r.spec, r.previous or r.spec) for r in self._ports.all())
        return Counter(i for pair in specs for i in {spec.overlay_id for spec in pair} if i is not None)

    def save_network(
        self, network_id: str, spec: NetworkSpec, held: Mapping[int, str] | None = None
    ) -> Overlay:
        """Save a network, with a local VLAN that is unique on this host.

        ``held`` maps the local VLANs in use on the host to networks: an existing network keeps its
        number, and no other network gets it.

        Raises: Conflict if another network has the VNI, CapacityExhausted.
        """
        with self._lock:
            for other in self._networks.values():
                if other.network_id != network_id and other.spec.vni == spec.vni:
                    raise Conflict(
                        f"VNI {spec.vni} is network {other.network_id}'s",
                        step="store",
                        fix="give each network a VNI of its own, or delete the other one",
                    )
            before = self._networks.get(network_id)
            vlan = before.local_vlan if before else self._free_vlan(network_id, held or {})
            network = Overlay(network_id, spec, vlan)
            with self.database.transaction():
                self.database.sql.execute(
                    "INSERT INTO networks VALUES (?, ?, ?, ?) ON CONFLICT (network_id) DO UPDATE "
                    "SET vni=excluded.vni, local_vlan=excluded.local_vlan, spec=excluded.spec",
                    (network_id, spec.vni, vlan, spec.model_dump_json()),
                )
                self.set_aside.forget("networks", network_id)
            self.set_aside.forgotten("networks", [network_id])
            self._networks = {**self._networks, network_id: network}
            return network

    def forget_network(self, network_id: str) -> None:
        """Delete a network. Raises: Conflict if it has ports."""
        with self._lock:
            ports = [record.port_id for record in self.ports_on(network_id)]
            if ports:
                raise Conflict(
                    f"network {network_id} has {len(ports)} ports here: {some(ports)}",
                    step="store",
                    fix="delete its ports before",
                )
            with self.database.transaction():
                self.database.sql.execute("DELETE FROM networks WHERE network_id = ?", (network_id,))
            self._networks = without(self._networks, [network_id])

    def _free_vlan(self, network_id: str, held: Mapping[int, str]) -> int:
        taken = {network.local_vlan for network in self._networks.values()}
        aside = {a.row.get("local_vlan"): a.key for a in self.set_aside.all()}
        held = {v: aside[v] for v in _LOCAL_VLANS if v in aside} | dict(held)
        own = sorted(v for v, holder in held.items() if holder == network_id and v not in taken)
        free = (v for v in _LOCAL_VLANS if v not in taken and v not in held)
        vlan = next(chain(own, free), None)
        if vlan is None:
            raise CapacityExhausted(
                f"all {len(_LOCAL_VLANS)} local VLANs of this host are taken by networks",
                step="store",
                fix="delete networks that this host no longer needs",
            )
        return vlan

    # -- findings --------------------------------------------------------------------------------

    def findings(self) -> list[Finding]:
        """Unreadable rows, and damaged databases that were moved aside. Reads files."""
        found = [
            Finding(
                id=f"store-row-{row.table}-{row.key}",
                status="warn",
                found=f"the row {row.key} of {row.table} could not be read and is set aside: {row.reason}",
                expected="a store whose rows can all be read",
                fix="repeat the request (PUT), or restore a copy: netplugin store restore",
            )
            for row in self.set_aside.all()
        ]
        found += [
            Finding(
                id=f"store-damaged-{path.name}",
                status="warn",
                found=f"the store was damaged; it is now {path}, and the agent began with an empty one",
                expected="a whole database",
                fix="look at the disk; let the platform PUT its ports again, or restore a copy: "
                f"netplugin store restore; then move {path.name} away",
            )
            for path in store_file.damaged(self.database.path.parent)
        ]
        return found


def _network_of(row: Row) -> Overlay:
    """Raises: ValueError, TypeError, KeyError."""
    return Overlay(row["network_id"], NetworkSpec.model_validate_json(row["spec"]), int(row["local_vlan"]))

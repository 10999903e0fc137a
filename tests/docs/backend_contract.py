"""What the agent relies on in a backend, as tests that a backend inherits.

They drive it as its worker does, by the agent's converge loop with a real store. What changes the machine is
run in a sandbox: ``python -m tests.lab.sandbox -- python -m pytest FILE``.
"""

from __future__ import annotations

import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from agents.ports.call import Call
from agents.ports.reconciler import Reconciler
from agents.store.port_table import Record
from agents.store.store import Store
from agents.telemetry.metrics import Metrics
from netplugin import options
from netplugin.api.errors import Conflict, NetpluginError, Unsupported
from netplugin.api.models import PortSpec, PortState, ReconcileReport
from netplugin.backend import Backend, Change, Intent, Plan
from netplugin.host.shared import Host
from netplugin.optional import NeedsClaims

DEADLINE_S = 30.0
#: How often the agent plans for a port at most, before what is left is an error.
ROUNDS = 3
#: A value other than the default, of fields that need a feature.
ASKS: Mapping[str, Any] = {
    "qos": {"egress_kbps": 100_000},
    "vf": {"trusted": True},
    "qemu_user": 1001,
    "port_name": "vnic0",
    "vhost_user_socket": "/run/vms/vm1/net.sock",
    "attachment": "netdev",
    "device": "veth0",
    "internal": True,
}


class Driven:
    """A backend as the worker of an agent drives it."""

    def __init__(self, kind: type[Backend[Any]], conf: Any, database: Path) -> None:
        self.host = Host(conf)
        self.backend = kind(conf, self.host)
        self.store = Store(database)
        self._reconciler = Reconciler(self.backend, self.store, Metrics(self.store))

    def put(self, port_id: str, spec: PortSpec) -> Record:
        """Raises: NetpluginError."""
        call = Call(Record(port_id, spec), time.monotonic() + DEADLINE_S)
        self._reconciler.plug.serve([call])
        record = call.future.result(0)
        assert record is not None
        return record

    def delete(self, port_id: str) -> None:
        call = Call(Intent(port_id, None), time.monotonic() + DEADLINE_S)
        self._reconciler.plug.serve([call])
        call.future.result(0)

    def check(self, **how: Any) -> ReconcileReport:
        return self._reconciler.check(**how)

    def planned(self) -> list[str]:
        """The changes that a drift check would make."""
        return [change.change for change in self.check(dry_run=True).changes]

    def close(self) -> None:
        self.backend.close()
        self.host.close()
        self.store.close()


class BackendContract:
    """The tests. A subclass names the backend, and has what only it can know of its host."""

    kind: ClassVar[type[Backend[Any]]]
    #: Fields of a port that the backend can plug, over those of ``make_spec``.
    fields: ClassVar[Mapping[str, Any]] = {}
    #: Fields that may change on a live port and that the host shows.
    changed: ClassVar[Mapping[str, Any]] = {
        "network": {"type": "flat", "physical_network": "physnet1", "mtu": 1400}
    }

    def look(self, conf: Any) -> Any:
        """All that the backend could have changed on the host, read without the backend and its stamps."""
        raise NotImplementedError

    def damage(self, conf: Any, port_id: str) -> None:
        """Change by hand, or remove, what the backend made for this port."""
        raise NotImplementedError

    def occupy(self, conf: Any, port_id: str) -> None:
        """Put what is not the backend's where this port would be."""
        raise NotImplementedError

    # -- what the tests have ----------------------------------------------------------------------

    @pytest.fixture
    def options(self) -> str:
        """The backend's part of the agent's configuration file."""
        return ""

    @pytest.fixture
    def conf(self, tmp_path: Path, options: str) -> Any:
        return configuration(tmp_path, options)

    @pytest.fixture
    def driven(self, conf: Any, tmp_path: Path) -> Iterator[Driven]:
        driven = self.start(conf, tmp_path)
        yield driven
        driven.close()

    def start(self, conf: Any, directory: Path) -> Driven:
        driven = Driven(self.kind, conf, directory / "agent.db")
        usability = driven.backend.probe()
        assert usability.usable, usability
        held = driven.backend.hold()
        assert held.usable, held
        driven.check()
        return driven

    def make_spec(self, **fields: Any) -> PortSpec:
        spec = {
            "vm_id": "vm1",
            "mac": "52:54:00:00:00:01",
            "backend": self.kind.name,
            "network": {"type": "flat", "physical_network": "physnet1"},
            "port_security": {"enabled": bool(self.kind.features.port_security)},
        }
        return PortSpec.model_validate({**spec, **self.fields, **fields})

    def intents(self, driven: Driven, *port_ids: str) -> list[Intent]:
        """Intents with their claims, as the agent would store them; nothing is stored."""
        backend, made = driven.backend, []
        observed = backend.observe(None, time.monotonic() + DEADLINE_S)
        taken = driven.store.claims()
        for port_id in port_ids:
            intent = Intent(port_id, self.make_spec())
            if isinstance(backend, NeedsClaims):
                claims = backend.claims(intent, observed, taken)
                taken = {**taken, **dict.fromkeys(claims, port_id)}
                intent = Intent(port_id, intent.spec, claims)
            made.append(intent)
        return made

    def plan(self, driven: Driven, intents: Sequence[Intent]) -> Plan:
        observed = driven.backend.observe(None, time.monotonic() + DEADLINE_S)
        return driven.backend.plan(intents, observed)

    def apply(self, driven: Driven, changes: Sequence[Change]) -> None:
        assert driven.backend.apply(changes, time.monotonic() + DEADLINE_S).failed == {}

    # -- a port -----------------------------------------------------------------------------------

    def test_a_port_is_made_and_read_back(self, driven: Driven, conf: Any) -> None:
        before = self.look(conf)
        assert driven.put("a", self.make_spec()).state is PortState.ACTIVE
        assert self.look(conf) != before
        observed = driven.backend.observe(None, time.monotonic() + DEADLINE_S)
        assert set(observed.ports) == {"a"}
        assert driven.planned() == []

    def test_the_same_again_changes_nothing(self, driven: Driven, conf: Any) -> None:
        driven.put("a", self.make_spec())
        before = self.look(conf)
        driven.put("a", self.make_spec())
        assert self.look(conf) == before

    def test_a_change_is_made_on_the_host(self, driven: Driven, conf: Any) -> None:
        driven.put("a", self.make_spec())
        before = self.look(conf)
        assert driven.put("a", self.make_spec(**self.changed)).state is PortState.ACTIVE
        assert self.look(conf) != before and driven.planned() == []
        driven.put("a", self.make_spec())
        assert self.look(conf) == before and driven.planned() == []

    def test_a_removed_port_leaves_nothing(self, driven: Driven, conf: Any) -> None:
        before = self.look(conf)
        for port_id in ("a", "b"):
            driven.put(port_id, self.make_spec())
        driven.delete("a")
        driven.delete("a")
        observed = driven.backend.observe(None, time.monotonic() + DEADLINE_S)
        assert set(observed.ports) == {"b"}
        driven.delete("b")
        assert self.look(conf) == before

    def test_an_observation_of_some_ports_has_no_others(self, driven: Driven) -> None:
        for port_id in ("a", "b"):
            driven.put(port_id, self.make_spec())
        observed = driven.backend.observe({"a", "c"}, time.monotonic() + DEADLINE_S)
        assert set(observed.ports) == {"a"}

    # -- without the agent's help -----------------------------------------------------------------

    def test_a_restart_changes_nothing(self, driven: Driven, conf: Any, tmp_path: Path) -> None:
        driven.put("a", self.make_spec())
        before = self.look(conf)
        driven.close()
        again = self.start(conf, tmp_path)
        assert again.planned() == [] and self.look(conf) == before
        again.delete("a")
        again.close()

    def test_drift_is_found_and_repaired(self, driven: Driven, conf: Any) -> None:
        driven.put("a", self.make_spec())
        before = self.look(conf)
        self.damage(conf, "a")
        damaged = self.look(conf)
        assert damaged != before
        assert driven.planned() != []
        assert self.look(conf) == damaged, "a dry run changes nothing"
        driven.check()
        assert self.look(conf) == before and driven.planned() == []

    def test_a_port_that_the_store_has_lost_stays(self, driven: Driven, conf: Any, tmp_path: Path) -> None:
        driven.put("a", self.make_spec())
        before = self.look(conf)
        driven.close()
        lost = tmp_path / "lost"
        lost.mkdir()
        again = self.start(conf, lost)
        assert again.check().orphans_kept == ["a"] and self.look(conf) == before
        assert again.put("a", self.make_spec()).state is PortState.ACTIVE
        assert self.look(conf) == before
        again.delete("a")
        again.close()

    def test_what_is_not_the_backends_stays(self, driven: Driven, conf: Any) -> None:
        self.occupy(conf, "a")
        before = self.look(conf)
        try:
            driven.put("a", self.make_spec())  # in another place, if there is one
        except NetpluginError as refused:
            assert refused.code == Conflict.code
        driven.delete("a")
        assert self.look(conf) == before and driven.store.get("a") is None

    @pytest.mark.parametrize("finished", [True, False], ids=["finished", "given up"])
    def test_what_was_cut_off_can_be(self, driven: Driven, conf: Any, finished: bool) -> None:
        """As after the end of the agent between two changes of a port that is stored."""
        before = self.look(conf)
        intents = self.intents(driven, "a")
        for stage in range(len(self.plan(driven, intents).changes) + 1):
            self.apply(driven, self.plan(driven, intents).changes[:stage])
            if finished:
                assert driven.put("a", self.make_spec()).state is PortState.ACTIVE
                assert driven.planned() == []
                driven.delete("a")
            for _ in range(ROUNDS):
                removal = [Intent("a", None, intents[0].claims)]
                self.apply(driven, self.plan(driven, removal).changes)
            assert self.look(conf) == before, f"after {stage} changes"

    # -- decisions --------------------------------------------------------------------------------

    def test_the_order_of_intents_does_not_matter(self, driven: Driven) -> None:
        driven.put("a", self.make_spec())
        removed = [Intent("a", None)]
        for intents in (self.intents(driven, "b", "c"), self.intents(driven, "b") + removed):
            assert self.plan(driven, intents) == self.plan(driven, intents[::-1])

    def test_a_change_is_of_its_ports(self, driven: Driven) -> None:
        intents = self.intents(driven, "a", "b")
        changes = self.plan(driven, intents).changes
        assert {port_id for change in changes for port_id in change.ports} == {"a", "b"}
        assert all(change.describe() for change in changes)

    def test_what_it_has_no_feature_for_is_refused(self, driven: Driven) -> None:
        backend, rules = driven.backend, PortSpec.rules()
        asked = {name: self.make_spec(**{name: value}) for name, value in ASKS.items()}
        unsupported = [s for n, s in asked.items() if not rules[n].supported(s, backend.features)]
        if backend.features.max_queues < 128:
            unsupported.append(self.make_spec(queues=128))
        if not backend.features.port_security:
            unsupported.append(self.make_spec(port_security={"enabled": True}))
        for spec in unsupported:
            with pytest.raises(Unsupported):
                backend.validate(spec)

    def test_the_binding_is_an_interface_of_libvirt(self, driven: Driven, conf: Any) -> None:
        (intent,) = self.intents(driven, "a")
        before = self.look(conf)
        binding = driven.backend.binding(intent)
        interface = ElementTree.fromstring(binding.interface_xml)
        mac = interface.find("mac")
        assert interface.tag == "interface" and mac is not None
        assert mac.get("address") == self.make_spec().mac
        assert driven.backend.binding(intent) == binding and self.look(conf) == before


def configuration(directory: Path, text: str) -> Any:
    """The agent's options, with this text as its configuration file."""
    file = directory / "agent.conf"
    file.write_text(text)
    return options.load([file])

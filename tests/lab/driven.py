"""A backend driven in this process: the agent's reconciler on a store's file, without a front end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from agents.ports.call import Call
from agents.ports.reconciler import Reconciler
from agents.store.port_table import Record
from agents.store.store import Store
from agents.telemetry.metrics import Metrics
from netplugin import options
from netplugin.api.models import Binding, PlannedChange, PortSpec
from netplugin.backend import Backend, Intent
from netplugin.host.shared import Host
from tests.lab.agent import PrivateAgent
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import wait_for

Serve = Callable[[Call], None]


class Driven:
    """``end`` and ``start`` again is the process that comes after: it finds what this one left."""

    def __init__(
        self,
        directory: Path,
        ovs: PrivateOvs,
        groups: Mapping[str, Mapping[str, str]],
        make: Callable[[Any, Host], Backend[Any]],
        deadline_s: float = 90.0,
    ) -> None:
        """``groups`` are options as `PrivateAgent` takes them, ``make`` gives the backend."""
        private = PrivateAgent(directory, ovs, groups)
        directory.mkdir(parents=True)
        private.config.write_text(private._text())
        self.conf = options.load([private.config])
        self.host = Host(self.conf)
        self._path = directory / "agent.db"
        self._make = make
        self._deadline_s = deadline_s
        self.wait_for_ovs()
        self.start()

    def start(self) -> None:
        """With a first look at the host."""
        self.store = Store(self._path)
        self.backend = self._make(self.conf, self.host)
        self.reconciler = Reconciler(self.backend, self.store, Metrics(self.store))
        self.reconciler.check()

    def end(self) -> None:
        self.store.close()
        self.backend.close()

    def close(self) -> None:
        self.end()
        self.host.close()

    def wait_for_ovs(self) -> None:
        wait_for(lambda: self.host.ovs.usable().usable, self._deadline_s, "OVS is there")

    def put(self, port_id: str, spec: Mapping[str, Any], serve: Serve | None = None) -> Binding:
        """Return the answer, or raise its error. ``serve`` is a worker's, or it is done here."""
        call = Call(Record(port_id, PortSpec.model_validate(spec)), time.monotonic() + self._deadline_s)
        (serve or self._serve)(call)
        record = call.future.result(self._deadline_s)
        assert record is not None
        return self.backend.binding(record)

    def delete(self, port_id: str, serve: Serve | None = None) -> None:
        call = Call(Intent(port_id, None), time.monotonic() + self._deadline_s)
        (serve or self._serve)(call)
        call.future.result(self._deadline_s)

    def planned(self) -> list[PlannedChange]:
        """What is not as it should be."""
        return self.reconciler.check(dry_run=True).changes

    def _serve(self, call: Call) -> None:
        again = self.reconciler.plug.serve([call])
        while again:
            time.sleep(0.05)  # as the worker does
            again = self.reconciler.plug.resume(again)

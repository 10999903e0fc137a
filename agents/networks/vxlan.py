"""VXLAN networks, which are shared by their ports and updated independently of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

from agents.networks.changes import OneAtATime, apply_on
from agents.ports.reconciler import NetworkOutcome
from agents.store.store import Store
from agents.worker import BackendWorker
from netplugin.api.conditions import NO_CONDITION, Condition, intent_tag
from netplugin.api.errors import Conflict, NotFound
from netplugin.api.models import NetworkInfo, NetworkSpec
from netplugin.api.problem import FieldError
from netplugin.backend import Overlay
from netplugin.fleet.names import Kind

LOG = logging.getLogger(__name__)


class Networks:
    """The networks of this host: kept in the store and applied by the workers of all backends."""

    def __init__(self, store: Store, workers: Mapping[str, BackendWorker], timeout_s: float) -> None:
        self._store = store
        self._workers = workers
        self._in_thread = store.database.in_thread
        self._one_at_a_time = OneAtATime(timeout_s)

    async def put(
        self, network_id: str, spec: NetworkSpec, condition: Condition = NO_CONDITION
    ) -> NetworkInfo:
        """Create or update a network; changing its peers does not affect its ports.

        If some ports cannot be updated, they are in ``errors``, and the others are updated.

        Raises: PreconditionFailed, Conflict for fields that cannot change while there are ports,
        CapacityExhausted, errors of the host; then the network is unchanged.
        """
        self._store.fleet.require_free(Kind.NETWORK, network_id, condition)
        async with self._one_at_a_time.turn() as deadline:
            before, network = await self._in_thread(self._save, network_id, spec, condition)
            outcome = await self._converge(network_id, deadline)
            if not outcome.reached:
                await self._go_back(network_id, before, deadline)
                raise outcome.failures[0]
            LOG.info("network %s has VNI %d and %d peers", network_id, spec.vni, len(spec.peers))
            for failure in outcome.failures:
                LOG.warning("network %s: %s", network_id, failure)
            errors = tuple(failure.problem() for failure in outcome.failures)
            info = self._info(network, len(self._store.ports_on(network_id)))
            return info.model_copy(update={"errors": errors})

    async def delete(self, network_id: str, condition: Condition = NO_CONDITION) -> None:
        """Delete the network. Raises: PreconditionFailed; Conflict if it has ports."""
        self._store.fleet.require_free(Kind.NETWORK, network_id, condition)
        async with self._one_at_a_time.turn():
            await self._in_thread(self._forget, network_id, condition)

    def get(self, network_id: str) -> NetworkInfo:
        """Raises: NotFound."""
        network = self._store.network(network_id)
        if network is None:
            raise NotFound(f"there is no network {network_id}", step="lookup")
        return self._info(network, len(self._store.ports_on(network_id)))

    def all(self) -> Iterator[NetworkInfo]:
        """Ordered by network id."""
        ports = self._store.ports_by_network()
        return (self._info(network, ports[network.network_id]) for network in self._store.networks())

    # -- internals -------------------------------------------------------------------------------

    def _info(self, network: Overlay, ports: int) -> NetworkInfo:
        return NetworkInfo(
            network_id=network.network_id,
            spec=network.spec,
            local_vlan=network.local_vlan,
            ports=ports,
        )

    def _save(
        self, network_id: str, spec: NetworkSpec, condition: Condition
    ) -> tuple[Overlay | None, Overlay]:
        """Save the spec and return the network before and after.

        It runs in the database thread, and so after earlier changes whose callers were cancelled.
        """
        held = {} if self._store.network(network_id) else self._held()
        with self._store.database.lock:  # no port may be added meanwhile
            before = self._store.network(network_id)
            is_done = before is not None and before.spec == spec
            condition.require(f"network {network_id}", _tag(before), is_done=is_done)
            if before is not None:
                self._refuse_fixed(before, spec)
            return before, self._store.save_network(network_id, spec, held)

    def _forget(self, network_id: str, condition: Condition) -> None:
        with self._store.database.lock:
            condition.require_missing_or(f"network {network_id}", _tag(self._store.network(network_id)))
            self._store.forget_network(network_id)

    def _refuse_fixed(self, before: Overlay, spec: NetworkSpec) -> None:
        """Refuse changes other than the peers: they are in use on other hosts and in the VMs."""
        old, new = before.spec.model_dump(), spec.model_dump()
        changed = [name for name in old if name != "peers" and old[name] != new[name]]
        if changed and self._store.ports_on(before.network_id):
            raise Conflict(
                f"{', '.join(changed)} of network {before.network_id} cannot change under its ports",
                step="validate",
                fix="delete its ports before, or make another network",
                errors=[FieldError(field=name, message="cannot change live") for name in changed],
            )

    def _held(self) -> dict[int, str]:
        """The local VLANs in use on the host. Raises: BackendUnavailable if a backend cannot read them."""
        held: dict[int, str] = {}
        for worker in self._workers.values():
            if isolates := worker.ports.extras.local_vlans:
                held |= isolates.held_vlans()
        return held

    async def _converge(self, network_id: str, deadline: float, *, undo: bool = False) -> NetworkOutcome:
        """Apply the network on all backends that have ports on it."""
        backends = {record.spec.backend for record in self._store.ports_on(network_id)}
        workers = [self._workers[name] for name in sorted(backends & set(self._workers))]
        return await apply_on(
            workers,
            deadline,
            lambda reconciler, until: reconciler.converge_network(network_id, until),
            undo=undo,
            settle_first=True,
        )

    async def _go_back(self, network_id: str, before: Overlay | None, deadline: float) -> None:
        """Restore the state before a failed change."""
        if before is None:
            await self._in_thread(self._store.forget_network, network_id)
            return
        await self._in_thread(self._store.save_network, network_id, before.spec)
        for failure in (await self._converge(network_id, deadline, undo=True)).failures:
            LOG.warning("network %s goes back: %s", network_id, failure)


def _tag(network: Overlay | None) -> str | None:
    return None if network is None else intent_tag(network.spec)

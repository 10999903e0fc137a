"""VXLAN networks: what a port's spec cannot say. A network changes on the host without its ports."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

from agents.lane import Lane, answer
from agents.reconciler import Spread, unknown_overlay
from agents.store import Store
from netplugin.backend import Overlay
from netplugin.errors import Conflict, FieldError, InvalidRequest, NetpluginError, NotFound
from netplugin.models import NetworkInfo, NetworkSpec, PortSpec

LOG = logging.getLogger(__name__)


class Networks:
    """The networks of this host, kept in the store and put onto the host by every backend's lane."""

    def __init__(self, store: Store, lanes: Mapping[str, Lane], timeout_s: float) -> None:
        self._store = store
        self._lanes = lanes
        self._timeout_s = timeout_s
        self._in_thread = store.database.in_thread
        # One change at a time: what a change that fails goes back to is what was there before it.
        self._one_at_a_time = asyncio.Lock()

    async def put(self, network_id: str, spec: NetworkSpec) -> NetworkInfo:
        """Make the network be as asked; peers come and go without touching its ports.

        A port that cannot be brought along holds up none of the others: it is in ``errors``.

        Raises: Conflict for what cannot change under its ports, CapacityExhausted, and what the
        host says; then the network is as it was before.
        """
        async with self._one_at_a_time:
            before, network = await self._in_thread(self._save, network_id, spec)
            spread = await self._converge(network_id)
            if not spread.reached:
                await self._go_back(network_id, before)
                raise spread.failures[0]
            LOG.info("network %s has VNI %d and %d peers", network_id, spec.vni, len(spec.peers))
            for failure in spread.failures:
                LOG.warning("network %s: %s", network_id, failure)
            errors = tuple(failure.problem() for failure in spread.failures)
            return self._info(network).model_copy(update={"errors": errors})

    async def delete(self, network_id: str) -> None:
        """Forget the network. Raises: Conflict while a port is on it."""
        async with self._one_at_a_time:
            await self._in_thread(self._store.forget_network, network_id)

    def get(self, network_id: str) -> NetworkInfo:
        """Raises: NotFound."""
        network = self._store.network(network_id)
        if network is None:
            raise NotFound(f"there is no network {network_id}", step="lookup")
        return self._info(network)

    def all(self) -> list[NetworkInfo]:
        return [self._info(network) for network in self._store.networks()]

    def resolve(self, spec: PortSpec) -> PortSpec:
        """The spec with the MTU of its VXLAN network, which a port need not say.

        Raises: InvalidRequest if there is no such network, or it has another MTU.
        """
        if spec.overlay_id is None:
            return spec
        network = self._store.network(spec.overlay_id)
        if network is None:
            raise unknown_overlay(spec.overlay_id)
        mtu = network.spec.mtu
        if "mtu" in spec.network.model_fields_set and spec.network.mtu != mtu:
            message = f"is {spec.network.mtu}, and network {spec.overlay_id} has {mtu}"
            raise InvalidRequest(
                f"network.mtu: {message}", step="validate", fix="leave it out",
                errors=[FieldError(field="network.mtu", message=message)],
            )  # fmt: skip
        return spec.model_copy(update={"network": spec.network.model_copy(update={"mtu": mtu})})

    # -- inside ----------------------------------------------------------------------------------

    def _info(self, network: Overlay) -> NetworkInfo:
        return NetworkInfo(
            network_id=network.network_id,
            spec=network.spec,
            local_vlan=network.local_vlan,
            ports=len(self._store.ports_on(network.network_id)),
        )

    def _save(self, network_id: str, spec: NetworkSpec) -> tuple[Overlay | None, Overlay]:
        """What it was and what it is now. In the database's thread, so after a change whose caller has
        gone and which goes on."""
        held = {} if self._store.network(network_id) else self._held()
        with self._store.database.lock:  # no port comes onto it meanwhile
            before = self._store.network(network_id)
            if before is not None:
                self._refuse_fixed(before, spec)
            return before, self._store.save_network(network_id, spec, held)

    def _refuse_fixed(self, before: Overlay, spec: NetworkSpec) -> None:
        """All but the peers is in use on other hosts too, and in the VMs: it cannot change live."""
        old, new = before.spec.model_dump(), spec.model_dump()
        changed = [name for name in old if name != "peers" and old[name] != new[name]]
        if changed and self._store.ports_on(before.network_id):
            raise Conflict(
                f"{', '.join(changed)} of network {before.network_id} cannot change under its ports",
                step="validate", fix="delete its ports before, or make another network",
                errors=[FieldError(field=name, message="cannot change live") for name in changed],
            )  # fmt: skip

    def _held(self) -> dict[int, str]:
        """Raises: BackendUnavailable while a backend cannot say."""
        held: dict[int, str] = {}
        for lane in self._lanes.values():
            held |= lane.reconciler.backend.held_vlans()
        return held

    async def _converge(self, network_id: str) -> Spread:
        """What became of it on all backends that have ports on the network."""
        backends = {record.spec.backend for record in self._store.ports_on(network_id)}
        whole = Spread()
        for name in sorted(backends & set(self._lanes)):
            try:
                part = await self._converge_on(self._lanes[name], network_id)
            except NetpluginError as error:
                part = Spread(False, (error,))
            # What is raised is why it was not reached: that comes first.
            failures = (
                (*whole.failures, *part.failures)
                if part.reached
                else (*part.failures, *whole.failures)
            )
            whole = Spread(whole.reached and part.reached, failures)
        return whole

    async def _converge_on(self, lane: Lane, network_id: str) -> Spread:
        deadline = time.monotonic() + self._timeout_s

        def work() -> Spread:
            return lane.reconciler.converge_network(network_id, deadline)

        return await answer(lane.errand(work, deadline), deadline)

    async def _go_back(self, network_id: str, before: Overlay | None) -> None:
        """A change that failed leaves nothing behind that was not there before."""
        if before is None:
            await self._in_thread(self._store.forget_network, network_id)
            return
        await self._in_thread(self._store.save_network, network_id, before.spec)
        for failure in (await self._converge(network_id)).failures:
            LOG.warning("network %s goes back: %s", network_id, failure)

"""Announces ports of VMs to the network: their bridge treats the frame as if the VM had sent it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from netplugin.backend import Intent
from netplugin.host.ovs import OvsHost


def send_frames(
    ovs: OvsHost, backend: str, intents: Sequence[Intent], frame: Callable[[str], bytes], deadline: float
) -> None:
    """Send the frame that ``frame`` makes of a MAC for each of these VMs (``netplugin.optional.Migrates``).

    The frames go through the flows of their ports: the bridge learns the MACs, and uplinks, VXLAN
    peers or the relay VF get them.
    """
    frames: dict[str, list[tuple[int, bytes]]] = defaultdict(list)
    for intent in intents:
        row = ovs.view.owned(backend, intent.port_id)
        ofport = row.works_at if row else None
        if row is not None and ofport and intent.spec is not None:
            frames[str(row.bridge)].append((ofport, frame(intent.spec.mac)))
    for bridge, those in frames.items():
        ovs.flows.send(bridge, those, deadline)

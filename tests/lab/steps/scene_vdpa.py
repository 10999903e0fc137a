"""A host with a real OVS-DPDK that relays to VFs, which are wires of the kernel's on model NICs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.lab.namespaces import namespace
from tests.lab.processes import run
from tests.lab.steps import launched_vdpa, operations
from tests.lab.steps.host_state import State
from tests.lab.steps.matrix import OPERATION_S, Scene
from tests.lab.steps.scene_ovs import host

_FAR = "np-faults-far"
_VF = re.compile(r"net_af_packet\d+,iface=npwire\d+")


@contextmanager
def scene(directory: Path, operation_s: int = OPERATION_S) -> Iterator[Scene]:
    """The backend vdpa. What is a step of the model's is none here: its VFs are in the agent's memory."""
    with namespace(_FAR):  # the wires go with it
        for name in launched_vdpa.WIRES:
            run(["ip", "link", "add", name, "type", "veth", "peer", "name", f"far-{name}", "netns", _FAR])
            run(["ip", "link", "set", name, "up"])
        options = {"vdpa": {"guest_hugepages": "false"}}
        wires = launched_vdpa.WIRES

        def state() -> State:
            """Whichever VF a port has: it takes one that is free."""
            return frozenset(_VF.sub("(a VF)", line) for line in made.state())

        with host(directory, "vdpa", options, operation_s, wires, launched=launched_vdpa.__name__) as made:
            yield Scene(
                "vdpa on OVS-DPDK and model NICs",
                made.agent,
                [
                    *operations.of_ports(made.calls, made.damage),
                    *operations.of_migrations(made.calls),
                ],
                state,
                made.reset,
            )

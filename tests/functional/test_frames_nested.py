"""Every kind of frame that a VM may send, on VLANs of Linux bridges: see test_frames_linuxbridge."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import pytest

from drivers.linuxbridge.segments import Segment
from tests.functional.test_frames_linuxbridge import scene, send_all
from tests.functional.wired_hosts import FAR, FAR_WIRE, WIRE
from tests.lab.frames import OTHER_VLAN
from tests.lab.frames_scene import tagged
from tests.lab.namespaces import connect, namespace
from tests.lab.switch import switch
from tests.lab.traffic_driver import Driven, driven

pytestmark = pytest.mark.nested

VLAN = 100
NETWORKS: Mapping[str, Mapping[str, Any]] = {
    "VLAN": {"type": "vlan", "physical_network": "physnet1", "vlan_id": VLAN},
    "another VLAN": {"type": "vlan", "physical_network": "physnet1", "vlan_id": OTHER_VLAN},
    "flat": {"type": "flat", "physical_network": "physnet1"},
}


@pytest.fixture
def hypervisor() -> Iterator[Driven]:
    with ExitStack() as stack:
        stack.enter_context(switch())
        stack.enter_context(namespace(FAR))
        made = stack.enter_context(driven(1, f"physnet1:{WIRE}"))
        connect(made.name, WIRE, FAR, FAR_WIRE)
        yield made


def test_each_frame_comes_out_where_the_table_says(hypervisor: Driven) -> None:
    far = (FAR, FAR_WIRE)
    with scene(hypervisor, "VLAN", NETWORKS, Segment("physnet1", VLAN), far, tagged(VLAN)) as made:
        send_all(hypervisor, NETWORKS["VLAN"], made)

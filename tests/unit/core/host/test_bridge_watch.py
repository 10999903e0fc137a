"""How often a watch of bridges reports changes that go on."""

from __future__ import annotations

import time
from contextlib import closing
from itertools import pairwise
from types import SimpleNamespace
from typing import cast

import pytest

from netplugin.host.bridge_watch import OvsBridgeWatch
from netplugin.host.openflow import OpenFlow
from netplugin.host.openflow_messages import Changed
from netplugin.host.supervisor import Supervisor
from tests.lab.processes import wait_for
from tests.unit.ovs import PATIENCE_S


@pytest.mark.parametrize("changed", [Changed.OURS, Changed.OTHERS])
def test_changes_that_go_on_are_reported_at_once_and_then_rarely(changed: Changed) -> None:
    flows, reports = SimpleNamespace(changed=None, descriptors=dict), list[float]()
    watch = OvsBridgeWatch(
        cast(OpenFlow, flows), list, lambda reason: reports.append(time.monotonic()), Supervisor()
    )
    with closing(watch):
        flows.changed("br0", Changed.NOTHING)
        flows.changed("br0", changed)
        wait_for(lambda: reports, PATIENCE_S, "the first report")

        def second() -> bool:
            flows.changed("br0", changed)
            return len(reports) > 1

        wait_for(second, PATIENCE_S, "the next report")
    gaps = [later - earlier for earlier, later in pairwise(reports)]
    assert min(gaps) > 0.9, "a controller that changes flows all the time keeps nobody busy"

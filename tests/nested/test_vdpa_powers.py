"""The vdpa backend with no more powers than the systemd unit leaves the agent, in the modes relay and vduse.

No systemd runs here. The agent without its front end runs in a thread that has the capabilities of the unit
and no others, as what it starts has (tests/functional/test_unit_powers.py runs the whole agent so, for the
other backends).
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from drivers.vdpa.driver import Vdpa
from drivers.vdpa.vduse_plan import vduse_name
from netplugin.api.errors import NetpluginError
from netplugin.api.models import PortState
from tests.docs.unit_file import settings
from tests.lab import preloaded
from tests.lab.driven import Driven
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import wait_for
from tests.nested import test_vdpa, vduse_host
from tests.nested.vduse_host import assert_nothing_left, devices, netdev, served_by
from tests.nested.vfs import driver, functions, vf_info, whole_state

UNIT = settings()
#: As those of test_vdpa.py and test_vduse_agent.py, whose guests these share.
of_relays = pytest.mark.nested(cpus=2, memory_mb=2560, hugepages=480)
of_vduse = pytest.mark.nested(cpus=2, memory_mb=2400, hugepages=400)
pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
WAIT_S = 90.0


@contextmanager
def bounded() -> Iterator[ThreadPoolExecutor]:
    """A thread with the powers of the unit; threads and programs that it starts have no others."""
    numbers = preloaded.numbers(UNIT["CapabilityBoundingSet"])
    with ThreadPoolExecutor(1, "bounded", preloaded.keep, (numbers,)) as thread:
        mask = f"{sum(1 << number for number in numbers):016x}"
        assert thread.submit(_masks).result() == {mask}
        yield thread


def _masks() -> set[str]:
    """The capabilities that this thread has, and those of a program that it starts."""
    status = "/proc/thread-self/status"
    texts = (Path(status).read_text(), subprocess.check_output(["cat", status], text=True))
    return {line.split()[1] for text in texts for line in text.splitlines() if line.startswith("CapEff")}


class BoundedAgent:
    """Its calls, made in such a thread."""

    def __init__(self, thread: ThreadPoolExecutor, ovs: PrivateOvs, options: Any) -> None:
        self._thread = thread
        self.driven = self._within(Driven, Path("/run/np-bounded"), ovs, options, Vdpa, WAIT_S)

    def put(self, port_id: str, spec: dict[str, Any]) -> Any:
        return self._within(self.driven.put, port_id, spec)

    def delete(self, port_id: str) -> None:
        self._within(self.driven.delete, port_id)

    def check(self) -> None:
        self._within(self.driven.reconciler.check)

    def restart(self) -> None:
        """With a look at the host, its findings and what there is to do."""
        self._within(self.driven.end)
        self._within(self.driven.start)
        found = self._within(self.driven.reconciler.findings)
        assert not [each for each in found if "ermi" in json.dumps(each.model_dump())], found
        assert self._within(self.driven.planned) == []

    def close(self) -> None:
        self._within(self.driven.close)

    def _within(self, call: Any, *arguments: Any) -> Any:
        return self._thread.submit(call, *arguments).result()


@contextmanager
def agent_on(ovs: PrivateOvs, options: Any, caplog: pytest.LogCaptureFixture) -> Iterator[BoundedAgent]:
    """In the end the kernel has refused it nothing."""
    caplog.set_level(logging.DEBUG)
    with bounded() as thread:
        agent = BoundedAgent(thread, ovs, options)
        try:
            yield agent
            assert agent.driven.store.records() == []
        finally:
            agent.close()
    assert "ermission denied" not in caplog.text and "not permitted" not in caplog.text


@of_relays
def test_a_relay_needs_no_more(pf: str, ovs: PrivateOvs, caplog: pytest.LogCaptureFixture) -> None:
    before = whole_state(pf, functions())
    with agent_on(ovs, test_vdpa.OPTIONS, caplog) as agent:
        binding = agent.put("nic1", test_vdpa.make_spec())
        assert binding.model_dump()["mode"] == "relay"
        address = functions()[1]
        assert driver(address) == "vfio-pci" and test_vdpa.is_open(address)
        assert vf_info(pf)[1]["address"] == test_vdpa.MAC and len(test_vdpa.ways(ovs)) == 2
        agent.put("nic1", test_vdpa.make_spec() | {"qos": {"egress_kbps": 2000, "ingress_kbps": 2000}})
        agent.restart()
        agent.delete("nic1")
    assert whole_state(pf, functions()) == before and ovs.vsctl("list-br") == ""


@of_vduse
def test_vduse_needs_no_more(caplog: pytest.LogCaptureFixture) -> None:
    """For the steps on a device: create, bind to either driver, delete."""
    with served_by("forky") as ovs:
        with agent_on(ovs, vduse_host.OPTIONS, caplog) as agent:
            binding = agent.put("a", vduse_host.make_spec(1))
            assert may_open("/dev/vduse/control") and may_open(binding.vhost_vdpa_device)
            agent.put("b", netdev(2))
            assert [vduse_host.driver(vduse_name(port)) for port in "ab"] == ["vhost_vdpa", "virtio_vdpa"]
            agent.restart()
            agent.delete("b")
            ovs.kill_vswitchd()
            with suppress(NetpluginError):
                agent.delete("a")
            ovs.start_vswitchd()
            agent.driven.wait_for_ovs()
            wait_for(lambda: gone(agent, "a"), WAIT_S, "it is removed")
            assert devices() == ([], [])
        assert_nothing_left(ovs)


def gone(agent: BoundedAgent, port_id: str) -> bool:
    agent.check()
    record = agent.driven.store.get(port_id)
    assert record is None or record.state is PortState.REMOVING
    return record is None


def may_open(path: str) -> bool:
    """Whether ``DeviceAllow=`` has its group of character devices, by its name in /proc/devices."""
    characters, _, _ = Path("/proc/devices").read_text().partition("Block devices:")
    names = dict(line.split() for line in characters.splitlines()[1:] if line)
    return f"char-{names[str(os.major(os.stat(path).st_rdev))]}" in UNIT["DeviceAllow"]

"""What a plug on Linux bridges costs beside many other ports, in messages; members of bridges by events."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from agents.ports.converge import Converged
from drivers.linuxbridge.driver import LinuxBridge
from netplugin.api.errors import HostError, OperationTimeout
from netplugin.api.models import PortSpec
from netplugin.backend import Intent
from netplugin.host import bridge_members, links, netlink, rtnetlink_messages
from netplugin.host.bridge_members import BridgeMembers
from netplugin.host.links import Links
from netplugin.host.names import provisional_mac
from netplugin.host.netlink import Channel
from tests.functional.test_linuxbridge_driver import make_driver
from tests.lab.loop import converge_alone
from tests.lab.processes import run

MANY = 150


@dataclass
class Cost:
    """Messages of the kernel, sockets that were opened to it, and processes."""

    messages: int = 0
    sockets: int = 0
    processes: list[Any] = field(default_factory=list)


@pytest.fixture
def cost(monkeypatch: pytest.MonkeyPatch) -> Cost:
    counted = Cost()
    numbered, opens = netlink.numbered, Channel.__init__

    def count(data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
        for message in numbered(data):
            counted.messages += 1
            yield message

    def opened(channel: Channel, *args: Any) -> None:
        counted.sockets += 1
        opens(channel, *args)

    def start(*args: Any, **_: Any) -> None:
        counted.processes.append(args)
        raise OSError("no process is needed")

    monkeypatch.setattr(netlink, "numbered", count)
    monkeypatch.setattr(rtnetlink_messages, "numbered", count)  # those of events
    monkeypatch.setattr(links, "_LOOK_S", 60)  # how often it looks while a device goes is chance
    monkeypatch.setattr(Channel, "__init__", opened)
    monkeypatch.setattr("netplugin.host.processes.subprocess.run", start)
    return counted


@pytest.fixture
def driver() -> Iterator[LinuxBridge]:
    made = make_driver(net1="")
    yield made
    seen = made.observe(None, time.monotonic() + 60)
    converge(made, dict.fromkeys(seen.ports))
    made.close()


def spec(number: int, *, filtered: bool = True) -> PortSpec:
    return PortSpec.model_validate(
        {
            "vm_id": "vm",
            "mac": f"52:54:00:01:{number >> 8:02x}:{number & 255:02x}",
            "backend": "linuxbridge",
            "network": {"type": "flat", "physical_network": "net1"},
            "port_security": {"allowed_addresses": [{"ip": "10.0.0.5"}]} if filtered else {"enabled": False},
        }
    )


def converge(driver: LinuxBridge, desired: dict[str, PortSpec | None]) -> Converged:
    result = converge_alone(driver, [Intent(port_id, each) for port_id, each in desired.items()])
    assert result.failed == {}
    return result


@pytest.mark.parametrize("filtered", [True, False], ids=["filtered", "unfiltered"])
def test_a_plug_takes_as_many_messages_with_many_ports(
    driver: LinuxBridge, cost: Cost, filtered: bool
) -> None:
    def costs(number: int) -> list[int]:
        found = []
        changed = spec(number, filtered=filtered).model_copy(update={"port_security": spec(1).port_security})
        for each in (spec(number, filtered=filtered), changed, changed, None):
            cost.messages = 0
            converge(driver, {f"p{number}": each})
            found.append(cost.messages)
        return found

    def others(numbers: range) -> None:
        converge(driver, {f"p{number}": spec(number, filtered=number % 2 == 0) for number in numbers})
        costs(1)  # what it lists once, it has listed then

    others(range(1000, 1002))
    few = costs(2)
    others(range(1002, 1000 + MANY))
    opened = cost.sockets
    assert costs(3) == few
    # For a deletion, which has a thread; and after each list of a kind of devices that the kernel does not
    # know, which it answers with all devices.
    assert cost.sockets - opened <= 1 + 2 * 4 * 2, "not for each of some hundred requests"
    assert cost.processes == [], "all of it without a process"
    cost.messages = 0
    assert len(driver.observe(None, time.monotonic() + 60).ports) == MANY
    assert cost.messages > 5 * MANY, "a look at the whole host reads all"


# -- deletions, whose last part takes the kernel long -----------------------------------------------


class SlowToForget(Links):
    """A kernel that keeps the memory of a deleted device until ``forget``: as with a leaked reference."""

    def __init__(self, *, deletes: bool = True) -> None:
        super().__init__()
        self.forget = threading.Event()
        self._deletes = deletes

    def _delete(self, name: str, index: int) -> None:
        if self._deletes:
            super()._delete(name, index)
        self.forget.wait(60)


def test_a_device_that_the_kernel_cannot_forget_is_deleted_and_its_name_free() -> None:
    slow = SlowToForget()
    try:
        for _ in range(3):
            slow.create_tap("lbslow", "mine", address=provisional_mac("mine"), multi_queue=False, mtu=1500)
            slow.delete("lbslow")
            assert slow.get("lbslow") is None
        slow.delete("lbslow")
    finally:
        slow.forget.set()


def test_a_device_that_does_not_go_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_DELETE_S", 0.1)
    slow = SlowToForget(deletes=False)
    slow.create_tap("lbstays", "mine", address=provisional_mac("mine"), multi_queue=False, mtu=1500)
    try:
        with pytest.raises(OperationTimeout, match="lbstays") as late:
            slow.delete("lbstays")
        assert late.value.step == "delete-link"
    finally:
        slow.forget.set()
        Links().delete("lbstays")


def test_what_the_kernel_refuses_to_delete_is_an_error() -> None:
    with pytest.raises(HostError, match="lo: Operation not supported"):
        Links().delete("lo")


def test_what_was_deleted_with_the_rules_of_a_chain_is_not_waited_for(driver: LinuxBridge) -> None:
    """The socket that transactions are sent on stays: to close it takes as long as the kernel frees rules."""
    nft = driver._kernel.nft._kernel
    converge(driver, {"p1": spec(1)})
    with nft._channels.use() as before:
        pass
    converge(driver, {"p1": None, "p2": spec(2)})
    with nft._channels.use() as after:
        assert after is before


# -- members of bridges by events ------------------------------------------------------------------

STEPS = (
    "link set lbt0 master lba",
    "link set lbt0 mtu 1400",
    "link set lbt0 name lbt9",
    "link set lbt9 master lbb",
    "link set lbt9 nomaster",
    "link set lbt9 master lba",
    "link set lba name lbc",
    "link set lbt1 master lbc",
    "link set lbt1 up",
    "link set lbt1 alias theirs",
    "link delete lbt9",
    "link set lbt1 netns lbelsewhere",
    "link add lbt2 master lbc type veth peer name lbt3 master lbb",
    "link delete lbt2",
    "link set lbx master lbb",
    "link delete lbb",
    "link delete lbc",
)


@pytest.fixture
def bridges() -> Iterator[None]:
    run(["ip", "netns", "add", "lbelsewhere"])
    for name in ("lba", "lbb"):
        run(["ip", "link", "add", name, "type", "bridge"])
    for name in ("lbt0", "lbt1", "lbx"):
        run(["ip", "tuntap", "add", name, "mode", "tap"])
    yield
    for name in ("lba", "lbb", "lbc", "lbt0", "lbt1", "lbt9", "lbx", "lbt2"):
        subprocess.run(["ip", "link", "delete", name], capture_output=True, check=False)
    run(["ip", "netns", "delete", "lbelsewhere"])


@pytest.mark.parametrize("queue", [None, 1], ids=["", "events are lost"])
@pytest.mark.parametrize("each", [True, False], ids=["each", "all at once"])
def test_members_are_what_the_kernel_has(
    bridges: None, monkeypatch: pytest.MonkeyPatch, queue: int | None, each: bool
) -> None:
    if queue is not None:
        monkeypatch.setattr(bridge_members, "_QUEUE", queue)
    kept, fresh = BridgeMembers(Links()), BridgeMembers(Links())
    kept.read(whole=False)
    seen = []
    for step in STEPS:
        run(["ip", *step.split()])
        if each:
            assert kept.read(whole=False) == fresh.read(whole=True), step
            seen.append(kept.read(whole=False))
    assert kept.read(whole=False) == fresh.read(whole=True)
    assert not each or {"lbt9": 1400} in [one.get("lba") for one in seen], "there was something to see"
    for one in (kept, fresh):
        one.close()


def test_nothing_is_listed_again_without_a_reason(bridges: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ports, listed = Links(), []
    real = ports.bridge_ports
    monkeypatch.setattr(ports, "bridge_ports", lambda: listed.append(1) or real())
    members = BridgeMembers(ports)
    for step in STEPS:
        members.read(whole=False)
        run(["ip", *step.split()])
    assert listed == [1]
    members.close()

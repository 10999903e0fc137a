"""VFs through the real agent on model NICs: many callers for few VFs, GET /v1/vfs, quarantine."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NoReturn

import pytest

from drivers.sriov.driver import Sriov
from drivers.vf.options import VfNumbers
from netplugin import options
from netplugin.api.client import Client
from netplugin.api.errors import (
    BackendUnavailable,
    CapacityExhausted,
    Conflict,
    HostError,
    InvalidRequest,
    NetpluginError,
    NotFound,
    OperationTimeout,
)
from netplugin.api.models import Port, PortSpec, PortState
from netplugin.cli.main import main
from tests.unit.agent import Agent, agent, served_agent
from tests.unit.drivers.sriov.model import Model
from tests.unit.drivers.sriov.world import make_spec, two_nics


class OtherVfs(Sriov):
    """Another backend with the same pool of VFs, in a worker of its own."""

    name: ClassVar[str] = "other"


#: Of a VM that has a device of the host which is no VF.
WITH_GPU = """<domain><name>vm</name><memory>9</memory><vcpu>1</vcpu><devices>
<hostdev type='pci'><source><address bus='0x41' slot='0' function='0'/></source></hostdev>
</devices></domain>"""


@dataclass
class Running:
    agent: Agent
    model: Model
    url: str


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    model = Model(*two_nics())
    conf = options.load([])
    backends = {"sriov": Sriov(conf, None, kernel=model), "other": OtherVfs(conf, None, kernel=model)}
    # Nothing of this machine's NICs is the model's news.
    for backend in backends.values():
        backend.watch = lambda wake, b=backend: super(Sriov, b).watch(wake)  # type: ignore[method-assign,misc]
    with agent(tmp_path, backends=backends) as made, served_agent(made) as url:
        yield Running(made, model, url)


def plug_all(url: str, specs: list[PortSpec]) -> list[Port | NetpluginError]:
    """All at once, each from a thread of its own."""
    together = threading.Barrier(len(specs))

    def plug(number: int) -> Port | NetpluginError:
        with Client(url) as client:
            together.wait()
            try:
                return client.put_port(f"p{number}", specs[number])
            except NetpluginError as refused:
                return refused

    with ThreadPoolExecutor(len(specs)) as threads:
        return list(threads.map(plug, range(len(specs))))


@pytest.mark.parametrize("backends", [["sriov"], ["sriov", "other"]])
def test_sixteen_plugs_for_seven_vfs(running: Running, backends: list[str]) -> None:
    """Also from two backends, whose threads know nothing of each other."""
    specs = [make_spec(n, backend=backends[n % len(backends)]) for n in range(16)]
    answers = plug_all(running.url, specs)
    ports = [a for a in answers if isinstance(a, Port)]
    refused = [a for a in answers if not isinstance(a, Port)]
    assert len(ports) == 7 and len(refused) == 9
    assert all(type(error) is CapacityExhausted for error in refused), refused
    addresses = {port.binding.model_dump()["pci_address"] for port in ports if port.binding}
    assert len(addresses) == 7
    assert {record.port_id for record in running.agent.store.records()} == {port.port_id for port in ports}, (
        "what was refused has left nothing behind"
    )


def test_the_list_of_vfs(running: Running) -> None:
    with Client(running.url) as client:
        client.put_port("a", make_spec(1))
        vfs = {vf.pci_address: vf for vf in client.list_vfs()}
    assert len(vfs) == 7
    mine = vfs["0000:03:10.0"]
    assert (mine.state, mine.port_id, mine.pf, mine.vf_index) == ("claimed", "a", "eth3", 0)
    assert (mine.numa_node, mine.physical_network, mine.driver) == (0, "net1", "vfio-pci")
    running.model.start_vm("0000:03:10.0")
    with Client(running.url) as client:
        states = {vf.pci_address: vf.state for vf in client.list_vfs()}
    assert states.pop("0000:03:10.0") == "allocated"
    assert set(states.values()) == {"available"}


def test_a_domain_with_a_vf_that_is_not_its_vm_s(running: Running) -> None:
    """It was its port's once, and another VM's port may have it by now."""

    def strange(xml: str) -> list[tuple[str, str]]:
        found = client.check_domain("vm1", xml)
        return [(f.status, f.found) for f in found if f.id == "nic-vf"]

    with Client(running.url) as client:
        client.put_port("a", make_spec(1))
        once = client.render_domain("vm1", WITH_GPU).xml
        assert strange(once) == []
        client.delete_port("a")
        client.put_port("b", make_spec(2))
        client.put_port("c", make_spec(1, mac="52:54:00:00:00:77"))
        taken = ("fail", "<interface> on 0000:03:10.0, a VF that port b of another VM has")
        again = client.render_domain("vm1", once).xml
        assert strange(once) == strange(again) == [taken]
        client.delete_port("b")
        free = ("fail", "<interface> on 0000:03:10.0, a VF that no port has")
        assert strange(again) == [free]
        running.model.pfs["0000:03:00.0"].numbers = VfNumbers(excluded=((0, 0),))
        assert strange(again) == [], "[sriov] devices leaves it out: the operator gives it to VMs"


def test_a_domain_is_checked_while_the_vfs_cannot_be_read(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unread() -> NoReturn:
        raise BackendUnavailable("no sysfs", step="vfs", fix="mount it")

    monkeypatch.setattr(asyncio.run(running.agent.service.domains()), "_vfs", unread)
    with Client(running.url) as client:
        client.put_port("a", make_spec(1))
        found = client.check_domain("vm1", WITH_GPU)
    [vfs] = [each for each in found if each.id == "nic-vf"]
    assert (vfs.status, vfs.found, vfs.fix) == ("warn", "no sysfs", "mount it")
    assert [each.status for each in found if each.id == "nic-missing"] == ["fail"]


def test_a_quarantine_is_seen_and_ended(
    running: Running, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NETPLUGIN_URL", running.url)
    running.model.broken = {"0000:03:10.0"}
    with Client(running.url) as client, pytest.raises(HostError):
        client.put_port("a", make_spec(1))
    running.model.broken = set()
    assert main(["vf", "list", "-f", "json"]) == 0
    [row] = [r for r in json.loads(capsys.readouterr().out) if r["state"] == "quarantined"]
    assert (row["pci_address"], row["reason"]) == ("0000:03:10.0", "mac: Input/output error")
    assert main(["vf", "release", "0000:03:10.0"]) == 0
    assert main(["vf", "release", "0000:03:10.0"]) == 0, "a second time is no error"
    assert main(["vf", "release", "0000:99:10.0"]) == 1
    printed = capsys.readouterr().err
    assert "not_found at lookup: there is no virtual function 0000:99:10.0" in printed
    assert "Fix: netplugin vf list has them all" in printed
    with Client(running.url) as client:
        assert {vf.state for vf in client.list_vfs()} == {"available"}
        with pytest.raises(InvalidRequest, match="pci_address"):
            client.release_vf("../../x")


def test_a_delete_that_waits_for_a_nic_is_ended_for_one_that_is_gone(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NETPLUGIN_URL", running.url)
    with Client(running.url) as client:
        client.put_port("a", make_spec(1, numa_node=0))
        assert main(["vf", "release", "0000:03:10.0"]) == 0, "of an active port it changes nothing"
        assert client.get_port("a").state is PortState.ACTIVE
        running.model.pfs["0000:03:00.0"].away = True
        with pytest.raises(OperationTimeout, match="there is no NIC") as waits:
            client.delete_port("a")
        assert waits.value.status == 504
        assert waits.value.fix and "DELETE /v1/vfs/0000:03:10.0/quarantine" in waits.value.fix
        assert client.get_port("a").state is PortState.REMOVING
        assert main(["vf", "release", "0000:03:10.0"]) == 0
        with pytest.raises(NotFound):
            client.get_port("a")


def test_a_port_that_goes_with_its_vm_is_not_released(running: Running) -> None:
    with Client(running.url) as client:
        client.put_port("a", make_spec(1, numa_node=0))
        running.model.start_vm("0000:03:10.0")
        with pytest.raises(Conflict, match="in use"):
            client.delete_port("a")
        with pytest.raises(Conflict, match="port a goes when it is free"):
            client.release_vf("0000:03:10.0")
        assert client.get_port("a").state is PortState.REMOVING


def test_without_a_backend_of_vfs_there_are_none(tmp_path: Path) -> None:
    with agent(tmp_path) as made, served_agent(made) as url, Client(url) as client:
        assert client.list_vfs() == []

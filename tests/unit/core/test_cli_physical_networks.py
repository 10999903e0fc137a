"""``netplugin physical-network``, run in this process against the real agent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import pytest

from netplugin.api.client import Client
from netplugin.api.models import PortSpec
from netplugin.host.physical_networks import PhysicalNetworks
from tests.unit.agent import SPEC, Agent, agent, served_agent
from tests.unit.agents.networks.keeper import Keeper, KeeperHost
from tests.unit.core.test_cli import Run

NIC, OTHER = "0000:03:00.0", "0000:03:00.1"


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    registry = PhysicalNetworks()
    backends = {"fake": Keeper(registry, KeeperHost())}
    with agent(tmp_path, backends=backends, networks=registry) as made, served_agent(made) as url:
        monkeypatch.setenv("NETPLUGIN_URL", url)
        yield made


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], running: Agent) -> Run:
    return Run(capsys)


def test_from_put_to_delete(run: Run) -> None:
    put = f"physical-network put net-1 --ovs-device {NIC} --ovs-device {OTHER} --bond lacp --mtu 9000 --keep"
    made = run.json(put)
    assert made["ovs"] == {"devices": [NIC, OTHER], "bond": "lacp"}
    assert (made["bridge"], made["mtu"], made["keep"], made["origin"]) == ("br-net-1", 9000, True, "api")
    assert run.json("physical-network show net-1") == made
    [row] = run.json("physical-network list")
    assert (row["name"], row["devices"], row["ports"]) == ("net-1", [NIC, OTHER], 0)
    assert f"there is no PCI device {NIC}" in row["findings"]
    assert run.json("physical-network put net-1 --bridge br7 --ovs")["bridge"] == "br7"
    for _ in range(2):
        assert run("physical-network delete net-1") == 0
    assert run("physical-network show net-1") == 1 and "no physical network net-1" in run.err
    assert run.json("physical-network list") == []


class LinuxKeeper(Keeper):
    network_parts: ClassVar[Mapping[str, bool]] = {"linuxbridge": True}


def test_a_linux_bridge_keeps_its_name_under_ports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    networks, run = PhysicalNetworks(), Run(capsys)
    backends = {"fake": LinuxKeeper(networks, KeeperHost())}
    with agent(tmp_path, backends=backends, networks=networks) as made, served_agent(made) as url:
        monkeypatch.setenv("NETPLUGIN_URL", url)
        put = "physical-network put physnet1 --interface eth1"
        found = run.json(f"{put} --bridge br-flat")
        assert (found["bridge"], found["ovs"]) == ("br-flat", None)
        with Client(url) as client:
            client.put_port("p1", PortSpec.model_validate(SPEC))
        for other in ("", " --bridge br-other"):
            assert run(put + other) == 1 and "bridge of physical network physnet1 cannot change" in run.err
        assert run.json(f"{put} --bridge br-flat") == {**found, "ports": 1}


def test_what_is_wrong_is_reported_before_it_is_sent(run: Run) -> None:
    for options, words in (
        ("", "one of ovs, linuxbridge and sriov is required"),
        (f"--ovs-device {NIC} --bond lacp", "a bond has two devices or more"),
        ("--ovs --mtu 1", "mtu"),
        ("--interface eth1 --bridge a-name-of-16-char", "bridge"),
    ):
        assert run(f"physical-network put net-1 {options}") == 1
        assert words in run.err
    for part in ("--linuxbridge", "--interface eth1", "--sriov-device eth1#0-7"):
        assert run(f"physical-network put net-1 {part}") == 1
        assert "no enabled backend uses it" in run.err

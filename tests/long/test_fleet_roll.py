"""A roll over three real agents, each on its own OVS-DPDK: interrupted, stopped by one host, and finished."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from netplugin.fleet import values
from netplugin.fleet.names import Ref
from netplugin.fleet.writer import BlockingWriter
from tests.functional.conftest import BASE, make_spec
from tests.lab.agent import PrivateAgent
from tests.lab.etcd import PrivateEtcd
from tests.lab.memory_hosts import history
from tests.lab.namespaces import namespace
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import wait_for

pytestmark = pytest.mark.long

HOSTS = ("h1", "h2", "h3")
STORAGE, PORT = Ref.of("physical-network/storage"), Ref.of("port/p1")
#: Of the hugepages of a sandbox all three have their part.
MEMORY_MB = 128


@dataclass(frozen=True)
class Fleet:
    etcd: PrivateEtcd
    agents: Mapping[str, PrivateAgent]
    ovs: Mapping[str, PrivateOvs]

    def begin(self, *words: str) -> subprocess.Popen[str]:
        """``netplugin fleet`` by a user with all rights, in a process of its own."""
        user = self.etcd.credentials()
        files = {name.upper(): str(getattr(user, name)) for name in ("ca", "cert", "key")}
        env = {"ENDPOINTS": ",".join(self.etcd.endpoints), **files}
        return subprocess.Popen(
            [sys.executable, "-m", "netplugin.cli.main", "fleet", *words],
            env={**os.environ, **{f"NETPLUGIN_FLEET_{name}": value for name, value in env.items()}},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *words: str) -> tuple[int, str]:
        process = self.begin(*words)
        printed, _ = process.communicate(timeout=180)
        return process.returncode, printed

    def bridges(self) -> dict[str, list[str]]:
        return {host: ovs.vsctl("list-br").split() for host, ovs in self.ovs.items()}

    def desired(self, host: str) -> str:
        return str(self.etcd.get(values.desired_key(host, STORAGE))["spec"]["bridge"])


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, BASE, ignore_errors=True)
        etcd = stack.enter_context(PrivateEtcd(BASE / "etcd"))
        etcd.enable_auth(*HOSTS)
        agents, ovs = {}, {}
        for host in HOSTS:
            netns = stack.enter_context(namespace(f"np-{host}"))
            ovs[host] = stack.enter_context(PrivateOvs(BASE / host, socket_mem_mb=MEMORY_MB, netns=netns))
            user = etcd.credentials(host)
            files = {name: str(getattr(user, name)) for name in ("ca", "cert", "key")}
            group = {"endpoints": ",".join(etcd.endpoints), "host": host, "role": "operate", **files}
            agent = PrivateAgent(BASE / f"agent-{host}", ovs[host], {"fleet": group})
            agents[host] = stack.enter_context(agent)
        yield Fleet(etcd, agents, ovs)


def test_a_roll_over_three_hosts(fleet: Fleet) -> None:
    etcd, spec = fleet.etcd, {"ovs": {}, "bridge": "br-old", "keep": True}
    with BlockingWriter(etcd.endpoints, etcd.credentials()) as mine:
        there = [mine.run(mine.writer.put(host, STORAGE, spec)) for host in HOSTS]
        port = make_spec(1, network={"physical_network": "storage"})
        there.append(mine.run(mine.writer.put("h2", PORT, port)))
        for each in there:
            mine.run(mine.writer.verified(each))
    assert set(map(tuple, fleet.bridges().values())) == {("br-old",)}

    # Killed while its first host is busy, a roll has changed that one alone.
    roll = ("roll", str(STORAGE), "--max-unavailable", "1", "--stop-on-error", "--timeout", "60")
    fleet.agents["h1"].daemon.pause()
    process = fleet.begin(*roll, "--change", json.dumps({"bridge": "br-new"}))
    wait_for(lambda: fleet.desired("h1") == "br-new", 30, "it is changed for the first host")
    process.kill()
    process.communicate()
    fleet.agents["h1"].daemon.resume()
    assert [fleet.desired(host) for host in HOSTS] == ["br-new", "br-old", "br-old"]
    wait_for(lambda: fleet.bridges()["h1"] == ["br-new"], 60, "its agent carries it out all the same")
    # On a busy machine its lease has run out meanwhile.
    wait_for(lambda: etcd.get(values.alive_key("h1")), 60, "its agent is connected")

    # It goes on there, and stops at a host that refuses: a port is on the bridge.
    status, printed = fleet.run(*roll)
    assert status == 1 and "h1: verified" in printed and "p1" in printed, printed
    assert [fleet.desired(host) for host in HOSTS] == ["br-new", "br-new", "br-old"]
    assert fleet.bridges() == {"h1": ["br-new"], "h2": ["br-old"], "h3": ["br-old"]}
    assert fleet.agents["h2"].get("/v1/ports/p1")[1]["state"] == "active"
    status, printed = fleet.run("status", "-f", "json")
    found = {each["id"] for each in json.loads(printed)}
    assert status == 1 and "failed-h2" in found and any(each.startswith("roll") for each in found), found

    # With the port gone it is finished; who was finished before is not changed again.
    assert fleet.run("drain", "h2", "--port", "p1")[0] == 0
    status, printed = fleet.run(*roll)
    assert status == 0 and printed.index("h2: verified") < printed.index("h3: verified"), printed
    assert set(map(tuple, fleet.bridges().values())) == {("br-new",)}
    assert fleet.run("status")[0] == 0 and not etcd.keys(values.root("roll"))
    written = asyncio.run(asyncio.wait_for(_written(etcd), 60))
    assert written["h1"] == written["h3"] == 2


async def _written(etcd: PrivateEtcd) -> dict[str, int]:
    """How often the network of each host was written."""
    client = etcd.client()
    try:
        return {host: len(all_) for (host, ref), all_ in (await history(client)).items() if ref == STORAGE}
    finally:
        await client.close()

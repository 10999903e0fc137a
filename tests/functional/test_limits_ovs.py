"""The limits of an OVS: no DPDK in it, and no vhost socket left."""

from __future__ import annotations

import shutil
from contextlib import suppress

import pytest

from netplugin.host.names import VHOST, device_name
from tests.functional.conftest import BASE, make_spec
from tests.functional.test_plug_ovs import plug, ports
from tests.lab.agent import PrivateAgent
from tests.lab.ovs import PrivateOvs
from tests.lab.ovs_releases import OvsPrograms
from tests.lab.processes import CommandError, wait_for

MAX_SOCKETS = 1024


@pytest.mark.parametrize("step", ["iface-types", "dpdk-init"])
def test_an_ovs_without_dpdk(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Built without it, or built with it and not configured to start it: another fix for each."""
    if step == "dpdk-init":
        monkeypatch.setattr(OvsPrograms, "vswitchd", OvsPrograms.vswitchd_dpdk)
    with (
        PrivateOvs(BASE / "plain", dpdk=False) as ovs,
        PrivateAgent(BASE / "agent", ovs, ready=False) as agent,
    ):
        assert "dpdkvhostuserclient" not in ovs.get("Open_vSwitch", ".", "iface_types")
        wait_for(
            lambda: "dpdk" in str(agent.get("/v1/backends")[1][0]["fix"]), 30, "it has looked at the host"
        )
        assert not agent.get("/v1/backends")[1][0]["usable"]
        status, error = agent.call("PUT", "/v1/ports/p1", make_spec())
        assert (status, error["code"], error["step"]) == (503, "backend_unavailable", step)
        assert agent.get("/v1/ports")[1] == []
        assert ovs.vsctl("list-br").split() == []
    shutil.rmtree(BASE / "agent")
    shutil.rmtree(BASE / "plain")


def _fill(ovs: PrivateOvs, count: int) -> None:
    """Vhost ports that are not ours, in transactions of 64."""
    ovs.appctl("vlog/set", "dpif_netdev:file:warn", "netdev_dpdk:file:warn", "dpdk:file:err")
    ovs.vsctl("add-br", "br-theirs", "--", "set", "bridge", "br-theirs", "datapath_type=netdev")
    for first in range(0, count, 64):
        args: list[str] = []
        for number in range(first, min(first + 64, count)):
            name = f"theirs{number}"
            args += ["--", "add-port", "br-theirs", name, "--", "set", "interface", name]
            args += ["type=dpdkvhostuserclient", f"options:vhost-server-path=/run/np/{name}"]
        ovs.vsctl(*args[1:], timeout=120)


@pytest.mark.long
def test_the_1025th_vhost_port(ovs: PrivateOvs) -> None:
    _fill(ovs, MAX_SOCKETS - 2)
    with PrivateAgent(BASE / "agent", ovs) as agent:
        plug(agent, "p1", make_spec(1))
        batch = [{"port_id": f"p{n}", "spec": make_spec(n)} for n in (2, 3)]
        results = agent.call("POST", "/v1/ports:batch", {"put": batch})[1]["results"]
        assert [r["status"] for r in results] == [200, 507]
        error = results[1]["error"]
        assert (error["code"], error["step"]) == ("capacity_exhausted", "plan")
        assert agent.get("/v1/ports/p3")[0] == 404
        assert set(ports(ovs)) == {device_name(VHOST, "p1"), device_name(VHOST, "p2")}
        # The limit is OVS's own: what the agent did not even try, OVS refuses.
        refused = ["type=dpdkvhostuserclient", "options:vhost-server-path=/run/np/last"]
        # Newer ones say so by the exit status too.
        with suppress(CommandError):
            ovs.vsctl("add-port", "br-theirs", "last", "--", "set", "interface", "last", *refused)
        assert ovs.get("Interface", "last", "ofport") == "-1"
        ovs.vsctl("del-port", "last")
        assert agent.call("DELETE", "/v1/ports/p2")[0] == 204
        plug(agent, "p3", make_spec(3))
    # Removing a thousand ports takes OVS long, and it is stopped anyway.
    ovs.kill_vswitchd()
    shutil.rmtree(BASE / "agent")

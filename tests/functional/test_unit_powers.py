"""The agent with no more powers than its systemd unit leaves it: does it still do its work?

No systemd runs here. ``setpriv`` takes the capabilities away that the unit takes away, read from the
unit itself, and a mount namespace makes all read-only that ``ProtectSystem=strict`` does. Then each
capability that is left is taken away too: the agent must miss it.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.docs.unit_file import settings
from tests.functional.conftest import BASE, make_spec
from tests.lab.agent import PrivateAgent
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import Daemon, LabError, run, wait_for

UNIT = settings()
CAPABILITIES = UNIT["CapabilityBoundingSet"]
QEMU_USER = 12345
#: Of this host and of another in the network of tunnels.
ADDRESS, PEER = "10.99.9.1", "10.99.9.2"

# $1: the directory that may be written; the rest is the command. systemd.exec(5): with "strict" all
# is read-only but for /dev, /proc and /sys. A mount under another one, as the sandbox's /run over that
# of a machine with network namespaces, is listed and cannot be reached.
_READ_ONLY = r"""
set -e
writable=$1; shift
mount --bind "$writable" "$writable"
findmnt -rno TARGET | while read -r where; do
    case $where in
        /proc|/proc/*|/sys|/sys/*|/dev|/dev/*|"$writable") ;;
        *) if mountpoint -q "$where"; then mount -o remount,bind,ro "$where"; fi ;;
    esac
done
if touch /run/of-others 2> /dev/null; then exit 99; fi
exec "$@"
"""


@contextmanager
def directory() -> Iterator[Path]:
    made = BASE / "bounded"
    made.mkdir(parents=True)
    try:
        yield made
    finally:
        shutil.rmtree(made)


def bounded(
    home: Path,
    options: Mapping[str, Mapping[str, str]],
    ovs: PrivateOvs | None = None,
    capabilities: Collection[str] = CAPABILITIES,
) -> PrivateAgent:
    """An agent within the bounds of the unit; ``home`` is all that it may write."""
    agent = PrivateAgent(home, ovs, options, capabilities=capabilities, as_installed=True)
    agent.groups["api"] |= {
        "socket": str(home / "agent.sock"),
        "socket_group": "daemon",
        "audit_log": str(home / "audit.log"),
    }
    command = [
        "unshare",
        "--mount",
        "--propagation=private",
        "sh",
        "-c",
        _READ_ONLY,
        "sh",
        str(home),
    ]
    agent.daemon = Daemon("netplugin-agent", [*command, *agent.daemon.args], agent.log)
    return agent


# include/uapi/linux/capability.h
_NUMBERS = {
    "CAP_CHOWN": 0,
    "CAP_DAC_OVERRIDE": 1,
    "CAP_FOWNER": 3,
    "CAP_FSETID": 4,
    "CAP_NET_ADMIN": 12,
    "CAP_NET_RAW": 13,
    "CAP_PERFMON": 38,
    "CAP_BPF": 39,
}


def effective(agent: PrivateAgent) -> int:
    status = Path(f"/proc/{agent.daemon.pid}/status").read_text().splitlines()
    [mask] = [line.split()[1] for line in status if line.startswith("CapEff")]
    return int(mask, 16)


def plug_change_and_delete(agent: PrivateAgent, *specs: dict[str, Any], checks: bool = True) -> None:
    """Between change and delete the agent is killed and started; ``checks``: and the host is checked."""
    for body in specs:
        status, port = agent.call("PUT", "/v1/ports/p1", body)
        assert (status, port.get("state")) == (200, "active"), port
    agent.kill()
    agent.start()
    status, port = agent.get("/v1/ports/p1")
    assert (status, port.get("state")) == (200, "active"), port
    if checks:
        status, findings = agent.get("/v1/host/checks")
        assert status == 200
        assert not [found for found in findings if "ermission" in json.dumps(found)], findings
    assert agent.call("DELETE", "/v1/ports/p1")[0] == 204
    assert "ermission" not in agent.log.read_text()
    assert "not permitted" not in agent.log.read_text()


SECURED = {"port_security": {"allowed_addresses": [{"ip": "10.0.0.5"}]}}
RATES = {"qos": {"ingress_kbps": 10_000, "egress_kbps": 10_000}}
VXLAN = {"network": {"type": "vxlan", "network_id": "blue"}}


def test_the_unit_is_what_is_tested_here() -> None:
    assert UNIT["User"] == ["root"] and UNIT["NoNewPrivileges"] == ["yes"]
    assert UNIT["ProtectSystem"] == ["strict"]


@contextmanager
def wire() -> Iterator[str]:
    run(["ip", "link", "add", "unit0", "type", "veth", "peer", "name", "unit1"])
    for end in ("unit0", "unit1"):
        run(["ip", "link", "set", end, "up"])
    run(["ip", "address", "add", f"{ADDRESS}/24", "dev", "unit1"])
    try:
        yield "unit0"
    finally:
        run(["ip", "link", "delete", "unit0"])


def test_linux_bridges_need_no_more() -> None:
    """Flat and VXLAN, with filters and rates."""
    with wire() as uplink, directory() as home:
        bridge = {"physical_interfaces": f"physnet1:{uplink}", "local_ip": ADDRESS}
        with bounded(home, {"linuxbridge": bridge}) as agent:
            assert effective(agent) == sum(1 << _NUMBERS[name] for name in CAPABILITIES)
            flat = make_spec(backend="linuxbridge", vlan_id=None)
            plug_change_and_delete(agent, flat, flat | SECURED, flat | RATES, flat)
            blue = {"type": "vxlan", "vni": 5001, "peers": [PEER]}
            assert agent.call("PUT", "/v1/networks/blue", blue)[0] == 200
            tunnelled = {**flat, **VXLAN}
            plug_change_and_delete(agent, tunnelled, tunnelled | RATES)


@pytest.mark.nested
def test_a_vlan_needs_no_more() -> None:
    """By the capabilities alone: imports, files and checks are those of the flat network."""
    with wire() as uplink, directory() as home:
        options = {"linuxbridge": {"physical_interfaces": f"physnet1:{uplink}"}}
        # A fork of one that has imported, for imports take half a minute in the guest, as do the checks.
        with PrivateAgent(home, options=options, capabilities=CAPABILITIES) as agent:
            assert effective(agent) == sum(1 << _NUMBERS[name] for name in CAPABILITIES)
            spec = make_spec(backend="linuxbridge")
            plug_change_and_delete(agent, spec, spec | SECURED | RATES, spec, checks=False)


#: Of users and groups that are not the agent's.
OTHERS = {
    "ovs": {"vhost_socket_group": "daemon"},
    "agent": {"enabled_backends": "dpdkvhostuser,linuxbridge"},
    "linuxbridge": {"physical_interfaces": "physnet1:"},
}
DEADLINE_S = 60.0
ALONE = {"qemu_user": QEMU_USER}


def test_ovs_needs_no_more(ovs: PrivateOvs) -> None:
    with directory() as home, bounded(home, OTHERS, ovs) as agent:
        spec = make_spec()
        plug_change_and_delete(agent, spec, spec | SECURED, spec | RATES)
        plug_change_and_delete(agent, spec | ALONE)


def gone_wrong(agent: PrivateAgent) -> str:
    """What the agent cannot do of a VM's way from plug to delete; empty if it can do all."""
    try:
        agent.start(ready=False)
    except LabError as dead:
        return str(dead)
    wait_for(lambda: agent.get("/readyz")[0] == 200 or refused(agent), DEADLINE_S, "it has looked")
    specs = [make_spec(0, vlan_id=None, backend="linuxbridge"), make_spec(1), make_spec(2, **ALONE)]
    for number, spec in enumerate(specs):
        status, port = agent.call("PUT", f"/v1/ports/p{number}", spec)
        # It may end after it has answered once: the group of its socket is set last.
        if status != 200 or port["state"] != "active":
            return str(port)
    _as_qemu_makes_it(Path(port["binding"]["socket_path"]))
    for number in range(len(specs)):
        status, error = agent.call("DELETE", f"/v1/ports/p{number}")
        if status != 204:
            return str(error)
    return ""


def refused(agent: PrivateAgent) -> bool:
    """Whether the kernel has refused it something (EPERM, EACCES)."""
    log = agent.log.read_text()
    return "not permitted" in log or "ermission denied" in log


def _as_qemu_makes_it(path: Path) -> None:
    """The socket of a VM in the directory of its own, of its own user."""
    with closing(socket.socket(socket.AF_UNIX)) as listening:
        listening.bind(str(path))
    os.chown(path, QEMU_USER, QEMU_USER)


@pytest.mark.parametrize("lost", [None, *CAPABILITIES])
def test_each_capability_is_needed(ovs: PrivateOvs, lost: str | None) -> None:
    with directory() as home:
        agent = bounded(home, OTHERS, ovs, {*CAPABILITIES} - {lost})
        try:
            wrong = gone_wrong(agent)
        finally:
            agent.stop()
            with bounded(home, OTHERS, ovs) as whole:  # what was left is removed
                for port in whole.get("/v1/ports")[1]:
                    assert whole.call("DELETE", f"/v1/ports/{port['port_id']}")[0] == 204
        assert bool(wrong) == bool(lost), wrong

"""The agent with no more powers than its systemd unit leaves it: does it still do its work?

No systemd runs here. ``setpriv`` takes the capabilities away that the unit takes away, read from the
unit itself, and a mount namespace makes all read-only that ``ProtectSystem=strict`` does.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.docs.unit_file import settings
from tests.functional.conftest import BASE, make_spec
from tests.lab.agent import PrivateAgent
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import Daemon, run

# $1: the directory that may be written; the rest is the command. systemd.exec(5): with "strict" all
# is read-only but for /dev, /proc and /sys.
_READ_ONLY = r"""
set -e
writable=$1; shift
mount --bind "$writable" "$writable"
findmnt -rno TARGET | while read -r where; do
    case $where in
        /proc|/proc/*|/sys|/sys/*|/dev|/dev/*|"$writable") ;;
        *) mount -o remount,bind,ro "$where" ;;
    esac
done
if touch /run/of-others 2> /dev/null; then exit 99; fi
exec "$@"
"""


def command(directory: Path, agent: tuple[str, ...]) -> list[str]:
    """The agent's command within the bounds of the unit."""
    unit = settings()
    bounds = [f"+{name.removeprefix('CAP_').lower()}" for name in unit["CapabilityBoundingSet"]]
    assert unit["User"] == ["root"] and unit["NoNewPrivileges"] == ["yes"]
    powers = ["setpriv", f"--bounding-set=-all,{','.join(bounds)}", "--inh-caps=-all",
              "--no-new-privs", "--"]  # fmt: skip
    return ["unshare", "--mount", "--propagation=private", "sh", "-c", _READ_ONLY, "sh",
            str(directory), *powers, *agent]  # fmt: skip


@contextmanager
def bounded(ovs: PrivateOvs | None = None, **groups: dict[str, str]) -> Iterator[PrivateAgent]:
    directory = BASE / "bounded"
    directory.mkdir(parents=True)
    agent = PrivateAgent(directory, ovs, groups)
    agent.groups["api"] |= {
        "socket": str(directory / "agent.sock"), "socket_group": "daemon",
        "audit_log": str(directory / "audit.log"),
    }  # fmt: skip
    agent.daemon = Daemon("netplugin-agent", command(directory, agent.daemon.args), agent.log)
    with agent:
        yield agent
    shutil.rmtree(directory)


# include/uapi/linux/capability.h
_NUMBERS = {"CAP_CHOWN": 0, "CAP_DAC_OVERRIDE": 1, "CAP_FOWNER": 3, "CAP_FSETID": 4,
            "CAP_NET_ADMIN": 12, "CAP_NET_RAW": 13, "CAP_BPF": 39}  # fmt: skip


def effective(agent: PrivateAgent) -> int:
    status = Path(f"/proc/{agent.daemon.pid}/status").read_text().splitlines()
    [mask] = [line.split()[1] for line in status if line.startswith("CapEff")]
    return int(mask, 16)


def plug_change_and_delete(agent: PrivateAgent, *specs: dict[str, Any]) -> None:
    for body in specs:
        status, port = agent.call("PUT", "/v1/ports/p1", body)
        assert (status, port.get("state")) == (200, "active"), port
    agent.kill()
    agent.start()
    status, port = agent.get("/v1/ports/p1")
    assert (status, port.get("state")) == (200, "active"), port
    status, checks = agent.get("/v1/host/checks")
    assert status == 200
    assert not [check for check in checks if "ermission" in json.dumps(check)], checks
    assert agent.call("DELETE", "/v1/ports/p1")[0] == 204
    assert "ermission" not in agent.log.read_text()
    assert "not permitted" not in agent.log.read_text()


SECURED = {"port_security": {"allowed_addresses": [{"ip": "10.0.0.5"}]}}


def test_a_linux_bridge_needs_no_more() -> None:
    """On a flat network with an uplink; the machine's kernel may have no VLANs and no rates."""
    run(["ip", "link", "add", "unit0", "type", "veth", "peer", "name", "unit1"])
    for end in ("unit0", "unit1"):
        run(["ip", "link", "set", end, "up"])
    try:
        with bounded(linuxbridge={"physical_interfaces": "physnet1:unit0"}) as agent:
            allowed = settings()["CapabilityBoundingSet"]
            assert effective(agent) == sum(1 << _NUMBERS[name] for name in allowed)
            spec = make_spec(backend="linuxbridge", vlan_id=None)
            plug_change_and_delete(agent, spec, spec | SECURED, spec)
    finally:
        run(["ip", "link", "delete", "unit0"])

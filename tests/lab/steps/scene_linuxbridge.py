"""A host with Linux bridges, in a network namespace, on which others have things too."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.lab.linuxbridge_strangers import THEIRS
from tests.lab.namespaces import connect, namespace, within
from tests.lab.processes import run
from tests.lab.service import service
from tests.lab.steps import host_state, operations
from tests.lab.steps.agent import SteppedAgent
from tests.lab.steps.matrix import OPERATION_S, Scene

_HOST, _OUTSIDE = "np-faults", "np-faults-far"
_KEPT = ("lo", "eth1", "eth2", "eth3", "svc0")


@contextmanager
def scene(directory: Path, operation_s: int = OPERATION_S, vlans: bool = False) -> Iterator[Scene]:
    """``vlans``: the kernel has VLAN devices; else ports are on flat networks."""
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        host = stack.enter_context(namespace(_HOST))
        outside = stack.enter_context(namespace(_OUTSIDE))
        for device in ("eth1", "eth2", "eth3"):
            connect(host, device, outside, device, mtu=9000)
        run(within(host, "ip address add 10.9.0.1/24 dev eth1".split()))
        for command in THEIRS:
            run(within(host, command.split(maxsplit=2 if command.startswith("nft") else -1)))
        served = stack.enter_context(service("np-svc", "svc0", "52:54:00:00:05:01", "10.0.0.5", host))
        options = {
            "agent": {"operation_timeout": str(operation_s)},
            "linuxbridge": {"physical_interfaces": "physnet1:eth2", "local_ip": "10.9.0.1"},
        }
        agent = SteppedAgent(directory / "agent", None, options, netns=host)
        calls = operations.Calls(agent, "linuxbridge", vlans)

        def state() -> host_state.State:
            return host_state.compared(
                host_state.of_links(host),
                host_state.of_bridges(host),
                host_state.of_files(agent.directory / "state"),
                host_state.of_store(agent.directory / "state" / "agent.db"),
            )

        def links() -> list[str]:
            return [link["ifname"] for link in json.loads(run(within(host, ["ip", "-j", "link"])))]

        def remove(name: str) -> None:
            if name in links():
                run(within(host, ["ip", "link", "delete", name]))

        def reset() -> None:
            agent.kill()
            for name in links():
                if name not in _KEPT and not name.startswith("theirs"):
                    remove(name)
            for table in json.loads(run(within(host, ["nft", "-j", "list", "tables"])))["nftables"]:
                if "table" in table and table["table"]["name"] != "theirs":
                    run(within(host, ["nft", "delete", "table", "bridge", table["table"]["name"]]))
            shutil.rmtree(agent.directory, ignore_errors=True)
            agent.start()
            status, body = calls.put(operations.NEIGHBOUR, 9)()
            assert status == 200, body

        def damage() -> None:
            port = json.loads(run(within(host, ["ip", "-j", "link"])))
            ours = [link["ifname"] for link in port if "p1" in link.get("ifalias", "").split(":")]
            for name in ours:
                remove(name)

        stack.enter_context(agent)
        reset()
        storage = {"keep": True, "mtu": 9000, "linuxbridge": {"interface": "eth3"}}
        yield Scene(
            "linuxbridge",
            agent,
            [
                *operations.of_ports(calls, damage),
                *operations.of_migrations(calls),
                *operations.of_overlays(calls),
                *operations.of_physical_networks(calls, storage),
                *operations.of_service_ports(
                    calls, served.spec("linuxbridge", network=calls.spec()["network"])
                ),
            ],
            state,
            reset,
        )

"""The agent with an OVS that comes, goes and hangs: what it notices, and how it ends."""

from __future__ import annotations

import http.client
import json
import os
import resource
import shutil
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

from tests.functional.conftest import BASE, make_spec
from tests.functional.test_plug_ovs import plug
from tests.lab.agent import PrivateAgent
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import Daemon, wait_for

DEADLINE_S = 60.0
#: FD_SETSIZE of select(2) is 1,024.
MANY = 1100


@contextmanager
def many_connections(agent: PrivateAgent) -> Iterator[None]:
    """Connections that stay open, so that what the agent opens next has a number above 1,023."""
    for pid in (0, agent.daemon.pid):
        most = resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, most))
    with ExitStack() as opened:
        for _ in range(MANY):
            connection = http.client.HTTPConnection("127.0.0.1", agent.port, timeout=DEADLINE_S)
            opened.enter_context(closing(connection))
            connection.request("GET", "/healthz")
            answer = connection.getresponse()
            assert answer.status == 200 and answer.read()
        yield


def is_usable(agent: PrivateAgent) -> bool:
    return bool(agent.get("/v1/backends")[1][0]["usable"])


def test_ovs_comes_and_goes_with_a_thousand_descriptors(ovs: PrivateOvs) -> None:
    options = {"api": {"max_connections": str(2 * MANY)}}
    with PrivateAgent(BASE / "agent", ovs, options) as agent:
        plug(agent, "p1", make_spec(1))
        # What the agent closes now it would open again under the same number: those are taken first.
        ovs.stop()
        wait_for(lambda: not is_usable(agent), DEADLINE_S, "OVS is gone")
        with many_connections(agent):
            ovs.start()
            wait_for(lambda: is_usable(agent), DEADLINE_S, "OVS is there again")
            plug(agent, "p2", make_spec(2))
            ovs.kill_vswitchd()
            wait_for(lambda: not is_usable(agent), DEADLINE_S, "it is noticed that vswitchd is gone")
            ovs.start_vswitchd()
            wait_for(lambda: is_usable(agent), DEADLINE_S, "vswitchd is there again")
            plug(agent, "p3", make_spec(3))
        for number in (1, 2, 3):
            assert agent.call("DELETE", f"/v1/ports/p{number}")[0] == 204
    shutil.rmtree(BASE / "agent")


#: The agent, with the times of its end (30, 42 and 55 s) made short.
SHORT_END = """
import sys
from agents import main
main._REFUSE_AFTER_S, main._ANSWERED_S, main._END_S = 4, 12, 20
sys.exit(main.main(sys.argv[1:]))
"""


def sent(agent: PrivateAgent, port_id: str, spec: dict[str, Any]) -> socket.socket:
    """A PUT that is under way, on a connection of its own."""
    body = json.dumps(spec).encode()
    head = f"PUT /v1/ports/{port_id} HTTP/1.1\r\nHost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n\r\n"
    caller = socket.create_connection(("127.0.0.1", agent.port), timeout=3 * DEADLINE_S)
    caller.sendall(head.encode() + body)
    # It was sent before this, which is answered: the call has been taken.
    assert agent.get("/healthz")[0] == 200
    return caller


def answer_on(caller: socket.socket) -> bytes:
    """All that the agent says until it closes the connection."""
    return b"".join(iter(lambda: caller.recv(65536), b""))


def test_it_ends_although_a_backend_hangs(ovs: PrivateOvs) -> None:
    """What waits behind the call that hangs is refused; what another backend does is answered."""
    options = {
        "agent": {
            "enabled_backends": "dpdkvhostuser,linuxbridge",
            "operation_timeout": "3600",
        },
        "linuxbridge": {"physical_interfaces": "physnet1:"},
    }
    with PrivateAgent(BASE / "agent", ovs, options) as agent, ExitStack() as opened:
        agent.stop()
        usual = agent.daemon
        at = usual.args.index("-m")  # python -m agents.main ...
        short = [*usual.args[:at], "-c", SHORT_END, *usual.args[at + 2 :]]
        agent.daemon = Daemon("netplugin-agent", short, agent.log)
        agent.start()
        ovs.pause_vswitchd()
        opened.callback(ovs.resume_vswitchd)
        hanging = opened.enter_context(closing(sent(agent, "p1", make_spec(1))))
        wait_for(lambda: agent.get("/v1/ports/p1")[0] == 200, DEADLINE_S, "the intent is stored")
        waiting = opened.enter_context(closing(sent(agent, "p2", make_spec(2))))
        flat = make_spec(3, vlan_id=None, backend="linuxbridge")
        assert agent.call("PUT", "/v1/ports/p3", flat)[0] == 200
        assert agent.call("DELETE", "/v1/ports/p3")[0] == 204
        os.kill(agent.daemon.pid, signal.SIGTERM)
        refused = answer_on(waiting)
        assert refused.startswith(b"HTTP/1.1 503 ") and b"the agent stops" in refused
        wait_for(lambda: not agent.daemon.running, DEADLINE_S, "the agent has ended")
        # Nobody has seen that it was plugged.
        assert not answer_on(hanging).startswith(b"HTTP/1.1 2")
        opened.close()
        agent.daemon.kill()
        agent.daemon = usual
        agent.start()
        # Nothing is left of what was cut off, or all of it: the next call finds the port either way.
        plug(agent, "p1", make_spec(1))
        assert agent.call("DELETE", "/v1/ports/p1")[0] == 204
    shutil.rmtree(BASE / "agent")

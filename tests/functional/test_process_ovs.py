"""The agent with more descriptors than select(2) takes: it goes on to hear of OVS."""

from __future__ import annotations

import http.client
import resource
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

from tests.functional.conftest import BASE, make_spec
from tests.functional.test_plug_ovs import plug
from tests.lab.agent import PrivateAgent
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import wait_for

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


def test_ovs_comes_and_goes_beside_a_thousand_descriptors(ovs: PrivateOvs) -> None:
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
            wait_for(
                lambda: not is_usable(agent), DEADLINE_S, "it is noticed that vswitchd is gone"
            )
            ovs.start_vswitchd()
            wait_for(lambda: is_usable(agent), DEADLINE_S, "vswitchd is there again")
            plug(agent, "p3", make_spec(3))
        for number in (1, 2, 3):
            assert agent.call("DELETE", f"/v1/ports/p{number}")[0] == 204
    shutil.rmtree(BASE / "agent")

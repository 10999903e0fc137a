"""The host at the agent: ``/v1/host``, the findings of the machine, and what stops the agent at its start."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from agents import main
from agents.host.view import HostView
from netplugin import options
from netplugin.api.client import Client
from netplugin.api.errors import HostError, OperationTimeout
from netplugin.tuning.facts import Facts, Live
from netplugin.tuning.intent import HostIntent
from tests.unit.agent import DEADLINE_S, agent, served_agent, view_of
from tests.unit.tuning.machines import Tree, load
from tests.unit.tuning.trees import tree

SMALL = tree(load("small"))


def test_what_the_host_is(tmp_path: Path) -> None:
    view = view_of(SMALL, tmp_path)
    with agent(tmp_path, view=view) as running, served_agent(running) as url, Client(url) as client:
        state = client.host()
    assert state.facts["cpus"]["online"] == "0-1"
    assert state.facts["memory"]["pools"][0]["total"] == 0
    assert state.live["ovs"] == {"unknown": "there is no such file", "path": f"{tmp_path}/db.sock"}
    assert "unknown" in state.live["domains"]


@pytest.mark.parametrize(
    ("intent", "expected"),
    [
        (None, {"hugepages": "warn"}),
        (HostIntent(pmd_cores=1), {"hugepages": "fail", "budget-pmd": "warn", "plan": "warn"}),
        (HostIntent(pmd_cores=2), {"hugepages": "warn", "plan": "fail"}),
    ],
    ids=["nothing is asked for", "a plan without CPUs for VMs", "a plan that cannot be made"],
)
def test_the_machine_is_checked_too(
    tmp_path: Path, intent: HostIntent | None, expected: dict[str, str]
) -> None:
    view = view_of(SMALL, tmp_path, intent)
    with agent(tmp_path, view=view) as running, served_agent(running) as url, Client(url) as client:
        found = {finding.id: finding for finding in client.checks()}
    assert {name: found[name].status for name in expected} == expected
    assert ("plan" in found) == (intent is not None)
    if expected.get("plan") == "fail":
        assert found["plan"].found.startswith("pmd_cores: 2 whole cores")
    if expected.get("plan") in ("warn", "fail"):
        assert found["plan"].fix


def test_the_cpus_of_vms_are_a_finding(tmp_path: Path) -> None:
    view = view_of(tree(load("published")), tmp_path, HostIntent(pmd_cores=8, vm_cores=4))
    [plan] = [finding for finding in view.findings(*view.facts()) if finding.id == "plan"]
    assert (plan.status, plan.fix) == ("ok", None) and plan.found.endswith("are for VMs")


@pytest.mark.parametrize(("given", "expected"), [(1, 15.0), (30, 15.0), (300, 150.0)])
def test_a_host_on_which_all_takes_longer_may_be_read_for_longer(
    given: int, expected: float, tmp_path: Path
) -> None:
    config = tmp_path / "netplugin.conf"
    config.write_text(f"[agent]\noperation_timeout = {given}\n")
    assert HostView.read(options.load([config]))._within_s == expected


def test_a_file_that_hangs_costs_its_deadline_and_no_more(tmp_path: Path) -> None:
    answers = threading.Event()

    class Hangs(HostView):
        def facts(self) -> tuple[Facts, Live]:
            assert answers.wait(DEADLINE_S)
            return super().facts()

    view = Hangs(None, tmp_path, "", view_of(SMALL, tmp_path)._root, within_s=0.2)
    with agent(tmp_path, view=view) as running, served_agent(running) as url, Client(url) as client:
        try:
            with pytest.raises(OperationTimeout, match=r"could not be read within 0\.2 s"):
                client.host()
            [finding] = client.checks()
            assert (finding.id, finding.status) == ("host-unseen", "fail")
            assert client.backends()[0].usable, "all else goes on"
        finally:
            answers.set()


class Slow(HostView):
    """Each read ends when the test lets it; it has the number of the read as the name of OVS's version."""

    def __init__(self, view: HostView) -> None:
        super().__init__(None, view._ovs_sockets, "", view._root)
        self._answer = super().facts()
        self.begun, self.go_on = 0, threading.Semaphore(0)

    def facts(self) -> tuple[Facts, Live]:
        self.begun += 1
        number = self.begun
        assert self.go_on.acquire(timeout=DEADLINE_S)
        facts, live = self._answer
        return facts, replace(live, versions={"read": str(number)})


def number_of(_: Facts, live: Live) -> int:
    return int(live.versions["read"])


def test_calls_that_wait_share_one_read_that_begins_after_them(tmp_path: Path) -> None:
    view = Slow(view_of(SMALL, tmp_path))

    async def calls() -> None:
        first = asyncio.create_task(view.within(number_of))
        await until(lambda: view.begun == 1)
        others = [asyncio.create_task(view.within(number_of)) for _ in range(20)]
        gone = asyncio.create_task(view.within(number_of))
        await asyncio.sleep(0)
        gone.cancel()  # whoever hangs up takes the read from nobody
        view.go_on.release()
        assert await first == 1
        await until(lambda: view.begun == 2)
        late = asyncio.create_task(view.within(number_of))
        await asyncio.sleep(0)
        view.go_on.release()
        assert await asyncio.gather(*others) == [2] * 20
        view.go_on.release()
        assert await late == 3, "not from before it asked"
        assert gone.cancelled() and view.begun == 3

    try:
        asyncio.run(calls())
    finally:
        view.close()


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not done():
            await asyncio.sleep(0.005)


def test_a_read_that_fails_fails_those_that_share_it_alone(tmp_path: Path) -> None:
    class Fails(Slow):
        def facts(self) -> tuple[Facts, Live]:
            facts, live = super().facts()
            if self.begun == 2:
                raise HostError("not to be read", step="host")
            return facts, live

    view = Fails(view_of(SMALL, tmp_path))

    async def calls() -> None:
        first = asyncio.create_task(view.within(number_of))
        await until(lambda: view.begun == 1)
        others = [asyncio.create_task(view.within(number_of)) for _ in range(3)]
        await asyncio.sleep(0)
        for _ in range(3):
            view.go_on.release()
        found = await asyncio.gather(first, *others, return_exceptions=True)
        assert found[0] == 1 and all(isinstance(each, HostError) for each in found[1:])
        assert await view.within(number_of) == 3

    try:
        asyncio.run(calls())
    finally:
        view.close()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("pmd_cores = some", "pmd_cores"),
        ("pmd_cores = 1\nlinks = -1", "[host] links: "),
        ("pmd_cores = 1\nvfs = ens1f0", "[host] vfs: "),
    ],
)
def test_a_wrong_option_stops_the_agent_before_it_touches_anything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, words: str
) -> None:
    file = tmp_path / "netplugin.conf"
    file.write_text(f"[DEFAULT]\nstate_path = {tmp_path / 'state'}\n[host]\n{line}\n")
    assert main.main(["--config-file", str(file)]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "state").exists()


def test_a_machine_that_is_no_machine_is_findings(tmp_path: Path) -> None:
    view = view_of(Tree(), tmp_path, HostIntent(pmd_cores=1))
    with agent(tmp_path, view=view) as running, served_agent(running) as url, Client(url) as client:
        assert {"plan", "unknown-fact"} <= {finding.id for finding in client.checks()}
        assert "unknown" in client.host().facts["cpus"]["online"]

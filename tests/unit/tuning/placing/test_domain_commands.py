"""``netplugin domain render|check`` and the client's calls below them, against the agent."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from netplugin.api.client import Client
from netplugin.api.domain_models import DomainPolicy
from netplugin.api.errors import Conflict, InvalidRequest, NotFound
from netplugin.api.models import PortSpec
from netplugin.cli.main import main
from tests.unit.agent import SPEC, Agent, agent, served_agent, view_of
from tests.unit.tuning.placing.strategies import Vm
from tests.unit.tuning.placing.test_domains import INTENT, machine

XML = Vm(1).xml


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    monkeypatch.setattr(logging.getLogger("agents"), "propagate", False)
    for name in ("TOKEN_FILE", "CA", "CERT", "KEY"):
        monkeypatch.delenv(f"NETPLUGIN_{name}", raising=False)
    view = view_of(machine(), tmp_path, INTENT)
    with agent(tmp_path, view=view) as made, served_agent(made) as url:
        monkeypatch.setenv("NETPLUGIN_URL", url)
        with Client(url) as client:
            client.put_port("p1", PortSpec.model_validate(SPEC))
        yield made


def test_rendered_pinned_and_checked(
    running: Agent, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "vm.xml"
    file.write_text(XML)
    assert main(["domain", "render", "vm-1", "--xml", str(file), "--pin", "--numa-node", "1"]) == 0
    placed = capsys.readouterr().out
    assert 'nodeset="1"' in placed and "<vcpupin" in placed
    monkeypatch.setattr("sys.stdin", io.StringIO(placed))
    assert main(["domain", "check", "vm-1", "--xml", "-", "-f", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {finding["status"] for finding in found} == {"ok"}
    assert main(["domain", "check", "vm-1", "--xml", str(file)]) == 1
    assert "nic-missing" in capsys.readouterr().out
    assert main(["domain", "check", "vm-2", "--xml", str(file)]) == 1
    assert "VM vm-2 has no ports here" in capsys.readouterr().err


def test_the_client_raises_what_the_agent_says(running: Agent) -> None:
    with Client.from_environment() as client:
        placed = client.render_domain("vm-1", XML, DomainPolicy(pin=True)).xml
        assert all(finding.status == "ok" for finding in client.check_domain("vm-1", placed))
        with pytest.raises(Conflict):
            client.render_domain("vm-1", XML, DomainPolicy(realtime=True))
        with pytest.raises(NotFound):
            client.check_domain("vm-2", XML)
        for vm_id, xml in (("..", XML), ("vm-1", "x" * 1_000_001), ("vm-1", "<network/>")):
            with pytest.raises(InvalidRequest):
                client.check_domain(vm_id, xml)

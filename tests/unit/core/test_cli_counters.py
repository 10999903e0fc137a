"""``netplugin port counters``, in this process against the real agent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from netplugin.cli.main import main
from tests.unit.agent import SPEC, agent, caller, served_agent
from tests.unit.agents.telemetry.test_port_counters import Counting
from tests.unit.fakes import FakeHost


@pytest.fixture(autouse=True)
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counting]:
    counting = Counting(FakeHost())
    with agent(tmp_path, backends={"counting": counting}) as made, served_agent(made) as url:
        monkeypatch.setenv("NETPLUGIN_URL", url)
        with caller(url) as client:
            assert client.put("/v1/ports/p1", json={**SPEC, "backend": "counting"}).status_code == 200
        yield counting


def test_it_lists_what_was_carried_and_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("port counters p1 -f json".split()) == 0
    rows = {(row["of"], row["counter"]): row["value"] for row in json.loads(capsys.readouterr().out)}
    assert rows["p1", "packets_from_vm"] == 7 and rows["p1", "packets_to_vm"] == 0
    assert rows["p1", "dropped: guest_ring_full"] == 3 and rows["p1", "ring_retries"] == 2
    assert rows['a"b', "dropped: missed"] == 9
    assert main("port counters p1".split()) == 0
    found = capsys.readouterr()
    assert "guest_ring_full" in found.out and "read at" in found.err


def test_it_prints_what_changes_for_some_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("port counters p1 --watch --seconds 1.5 -f value".split()) == 0
    found = capsys.readouterr()
    assert 'p1: nothing; a"b: nothing' in found.err and "packets_from_vm" in found.out


def test_a_port_that_does_not_exist_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("port counters p2".split()) == 1
    assert "there is no port p2" in capsys.readouterr().err

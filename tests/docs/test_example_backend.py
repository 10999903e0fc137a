"""The example of docs/writing-a-backend.md, driven by the agent's own converge loop and store."""

from __future__ import annotations

import configparser
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from oslo_config import cfg

from agents import backends
from agents.metrics import Metrics
from agents.ports.operations import Delete, Put
from agents.ports.reconciler import Reconciler
from agents.store.store import Record, Store
from netplugin.api.errors import CapacityExhausted, Conflict, HostError, Unsupported
from netplugin.api.models import PortSpec, PortState, ReconcileReport
from netplugin.backend import Backend, Claim
from netplugin.host.shared import Host
from tests.docs.blocks import ROOT, blocks
from tests.docs.example_backend import GROUP, MARK, Slots, list_opts

COUNT = 3
PAGE = ROOT / "docs/writing-a-backend.md"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    slots = tmp_path / "slots"
    slots.mkdir()
    return slots


@pytest.fixture
def conf(tmp_path: Path, directory: Path) -> Any:
    file = tmp_path / "slots.conf"
    file.write_text(f"[slots]\ndirectory = {directory}\ncount = {COUNT}\n")
    conf = cfg.ConfigOpts()
    conf([], project="netplugin", default_config_files=[str(file)], default_config_dirs=[])
    return conf


class Example:
    """The example on a directory, as the lane of an agent would drive it."""

    def __init__(self, conf: Any, store: Store) -> None:
        self.store = store
        backend: Backend[Any] = Slots(conf, Host(conf))
        self._reconciler = Reconciler(backend, store, Metrics(store))

    def put(self, port_id: str, **fields: Any) -> Record:
        future: Future[Record] = Future()
        deadline = time.monotonic() + 10
        self._reconciler.serve([Put(port_id, make_spec(**fields), deadline, future)])
        return future.result(0)

    def delete(self, port_id: str) -> None:
        future: Future[None] = Future()
        self._reconciler.serve([Delete(port_id, time.monotonic() + 10, future)])
        future.result(0)

    def check(self, **how: Any) -> ReconcileReport:
        return self._reconciler.check(**how)


@pytest.fixture
def start(tmp_path: Path, conf: Any) -> Iterator[Callable[[], Example]]:
    """Starts an agent's part anew, on the same store."""
    stores: list[Store] = []

    def fresh() -> Example:
        for store in stores:
            store.close()
        stores[:] = [Store(tmp_path / "agent.db")]
        example = Example(conf, stores[0])
        example.check()
        return example

    yield fresh
    for store in stores:
        store.close()


@pytest.fixture
def example(start: Callable[[], Example]) -> Example:
    return start()


def make_spec(mtu: int = 1500, filtered: bool = False) -> PortSpec:
    return PortSpec.model_validate(
        {
            "vm_id": "vm1",
            "mac": "52:54:00:00:00:01",
            "backend": "slots",
            "network": {"type": "flat", "physical_network": "physnet1", "mtu": mtu},
            "port_security": {"enabled": filtered},
        }
    )


def test_a_plug_claims_a_slot_and_fills_it(example: Example, directory: Path) -> None:
    record = example.put("a")
    assert (record.state, record.claims) == (PortState.ACTIVE, (Claim("slot", "0"),))
    assert (directory / "0").read_text() == f"{MARK}a\nmac=52:54:00:00:00:01 mtu=1500\n"
    assert example.put("b").claims == (Claim("slot", "1"),)


def test_the_same_again_changes_nothing(example: Example, directory: Path) -> None:
    example.put("a")
    before = (directory / "0").stat().st_mtime_ns
    assert example.put("a").state is PortState.ACTIVE
    assert (directory / "0").stat().st_mtime_ns == before
    assert example.check(dry_run=True).changes == []


def test_a_change_keeps_the_slot(example: Example, directory: Path) -> None:
    example.put("a")
    assert example.put("a", mtu=9000).claims == (Claim("slot", "0"),)
    assert "mtu=9000" in (directory / "0").read_text()


def test_drift_is_repaired_and_a_dry_run_only_tells(example: Example, directory: Path) -> None:
    example.put("a")
    wanted = (directory / "0").read_text()
    (directory / "0").write_text(f"{MARK}a\nmtu=1\n")
    (directory / "2").write_text(f"{MARK}a\nanother one\n")
    report = example.check(dry_run=True)
    assert [change.change for change in report.changes] == ["ClearSlot", "WriteSlot"]
    assert (directory / "2").exists()
    example.check()
    assert (directory / "0").read_text() == wanted
    assert [file.name for file in directory.iterdir()] == ["0"]
    assert example.check(dry_run=True).changes == []


def test_removal_gives_the_slot_back(example: Example, directory: Path) -> None:
    example.put("a")
    example.delete("a")
    example.delete("a")
    assert list(directory.iterdir()) == []
    assert example.store.claims() == {}
    assert example.put("b").claims == (Claim("slot", "0"),)


def test_with_every_slot_taken_the_next_port_has_an_error(example: Example) -> None:
    for port_id in ("a", "b", "c"):
        example.put(port_id)
    with pytest.raises(CapacityExhausted, match="all 3 slots"):
        example.put("d")
    assert example.store.get("d") is None
    example.delete("b")
    assert example.put("d").claims == (Claim("slot", "1"),)


def test_what_is_not_ours_is_left_alone(example: Example, directory: Path) -> None:
    (directory / "0").write_text("a stranger's\n")
    assert example.put("a").claims == (Claim("slot", "1"),)
    (directory / "1").write_text("a stranger's too\n")
    report = example.check()
    assert [problem.code for problem in report.errors] == [Conflict.code]
    record = example.store.get("a")
    assert record is not None and record.state is PortState.FAILED
    example.delete("a")
    assert {file.read_text() for file in directory.iterdir()} == {
        "a stranger's\n",
        "a stranger's too\n",
    }


def test_a_restart_and_a_lost_store(tmp_path: Path, directory: Path, start: Callable[[], Example]) -> None:
    example = start()
    example.put("a")
    example.put("b")
    example = start()
    assert example.check(dry_run=True).changes == []
    for file in tmp_path.glob("agent.db*"):
        file.unlink()
    example = start()
    assert example.check().orphans_kept == ["a", "b"]
    assert example.put("b").claims == (Claim("slot", "1"),), "it stays where it is"
    assert example.check(remove_orphans=True).orphans_kept == []
    assert [file.name for file in directory.iterdir()] == ["1"]


def test_what_it_cannot_do_is_refused(example: Example, directory: Path) -> None:
    with pytest.raises(Unsupported):
        example.put("a", filtered=True)
    (directory / "0").mkdir()  # the file cannot be written
    with pytest.raises(HostError, match="directory"):
        example.put("a")
    assert example.store.get("a") is None, "undone"


def test_a_host_without_the_directory_is_said_with_the_fix(conf: Any, directory: Path) -> None:
    directory.rmdir()
    usability = Slots(conf, Host(conf)).probe()
    assert not usability.usable and usability.fix == f"mkdir {directory}"


def test_the_page_has_the_example_whole() -> None:
    code = [block.text for block in blocks(PAGE) if block.language == "python"]
    assert (ROOT / "tests/docs/example_backend.py").read_text() in code


def test_the_registration_of_the_page_is_found(
    tmp_path: Path, conf: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ``setup.cfg`` of the page, installed as a package of its own; its module is the example."""
    (text,) = (b.text for b in blocks(PAGE) if b.language == "ini" and "[metadata]" in b.text)
    parser = configparser.ConfigParser()
    parser.read_string(text)
    groups = parser["options.entry_points"]
    info = tmp_path / "site/netplugin_slots-1.0.dist-info"
    info.mkdir(parents=True)
    metadata = f"Metadata-Version: 2.1\nName: {parser['metadata']['name']}\nVersion: 1.0\n"
    (info / "METADATA").write_text(metadata)
    (info / "entry_points.txt").write_text(
        "".join(f"[{group}]\n{lines.strip()}\n" for group, lines in groups.items())
    )
    module = sys.modules["tests.docs.example_backend"]
    monkeypatch.setitem(sys.modules, "netplugin_slots", module)
    monkeypatch.syspath_prepend(str(info.parent))
    loaded = backends.load(["slots"], conf, Host(conf))
    assert loaded.broken == {}
    assert isinstance(loaded.backends["slots"], Slots)
    assert "netplugin_slots:list_opts" in groups["oslo.config.opts"]
    assert list_opts()[0][0] == GROUP

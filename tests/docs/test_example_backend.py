"""The examples of docs/writing-a-backend.md, driven by the agent's own converge loop and store."""

from __future__ import annotations

import inspect
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pytest
from oslo_config import cfg
from stevedore.extension import ExtensionManager

from agents import backends
from agents.store.port_table import Record
from netplugin import options
from netplugin.api.errors import CapacityExhausted, Conflict, HostError, Unsupported
from netplugin.api.models import Features, FieldRule, PortSpec, PortState
from netplugin.backend import Backend, Claim, Intent
from netplugin.host.shared import Host
from netplugin.optional import Extras
from tests.docs.backend_contract import Driven
from tests.docs.blocks import ROOT, blocks
from tests.docs.example_backend import GROUP, MARK, Files, list_opts
from tests.docs.example_claims import Slots
from tests.unit.agent import agent, caller, served_agent

PAGE = ROOT / "docs/writing-a-backend.md"
TESTS_PAGE = ROOT / "docs/testing-a-backend.md"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    files = tmp_path / "files"
    files.mkdir()
    return files


@pytest.fixture
def conf(tmp_path: Path, directory: Path) -> Any:
    file = tmp_path / "files.conf"
    file.write_text(f"[files]\ndirectory = {directory}\n")
    conf = cfg.ConfigOpts()
    conf([], project="netplugin", default_config_files=[str(file)], default_config_dirs=[])
    return conf


class Example(Driven):
    """The example on a directory."""

    def put(self, port_id: str, spec: PortSpec | None = None, **fields: Any) -> Record:
        return super().put(port_id, spec or make_spec(**fields))


@pytest.fixture
def start(tmp_path: Path, conf: Any) -> Iterator[Callable[..., Example]]:
    """Starts an agent's part again, on the same store."""
    started: list[Example] = []

    def fresh(kind: type[Files] = Slots) -> Example:
        for example in started:
            example.close()
        started[:] = [Example(kind, conf, tmp_path / "agent.db")]
        started[0].check()
        return started[0]

    yield fresh
    for example in started:
        example.close()


@pytest.fixture
def example(start: Callable[..., Example]) -> Example:
    return start()


def make_spec(mtu: int = 1500, filtered: bool = False, backend: str = "slots") -> PortSpec:
    return PortSpec.model_validate(
        {
            "vm_id": "vm1",
            "mac": "52:54:00:00:00:01",
            "backend": backend,
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
    desired = (directory / "0").read_text()
    (directory / "0").write_text(f"{MARK}a\nmtu=1\n")
    (directory / "2").write_text(f"{MARK}a\nanother one\n")
    report = example.check(dry_run=True)
    assert [change.change for change in report.changes] == ["RemoveFile", "WriteFile"]
    assert (directory / "2").exists()
    example.check()
    assert (directory / "0").read_text() == desired
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


def test_a_restart_and_a_lost_store(tmp_path: Path, directory: Path, start: Callable[..., Example]) -> None:
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


def test_a_host_without_the_directory_is_reported_with_the_fix(conf: Any, directory: Path) -> None:
    directory.rmdir()
    usability = Files(conf, Host(conf)).probe()
    assert not usability.usable and usability.fix == f"mkdir {directory}"


# -- the page ------------------------------------------------------------------------------------


def code_of(language: str, page: Path = PAGE) -> list[str]:
    return [block.text for block in blocks(page) if block.language == language]


def test_the_pages_have_the_examples_whole() -> None:
    pages = {"example_backend": PAGE, "example_claims": PAGE, "test_example_contract": TESTS_PAGE}
    for example, page in pages.items():
        text = (ROOT / f"tests/docs/{example}.py").read_text()
        assert text.replace("tests.docs.example_backend", "netplugin_files") in code_of("python", page)


def test_the_first_example_needs_the_contract_alone(conf: Any) -> None:
    assert set(vars(Extras.of(Files(conf, Host(conf)))).values()) == {None}
    overridden = {name for name in vars(Files) if not name.startswith("_") and hasattr(Backend, name)}
    assert overridden == Backend.__abstractmethods__ | {"validate"}


def test_a_package_by_the_book_is_a_backend_of_the_agent(
    tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The three files of the page, installed by pip; then a port over HTTP."""
    package, site = tmp_path / "package", tmp_path / "site"
    package.mkdir()
    (package / "netplugin_files.py").write_text((ROOT / "tests/docs/example_backend.py").read_text())
    (setup,) = (text for text in code_of("ini") if "[metadata]" in text)
    (package / "setup.cfg").write_text(setup)
    (package / "pyproject.toml").write_text(*code_of("toml"))
    install = "-m pip install -q --no-compile --no-index --no-deps --no-build-isolation --target"
    subprocess.run([sys.executable, *install.split(), site, package], check=True)
    monkeypatch.syspath_prepend(str(site))
    # Of the whole process: a test before this one may have filled it, without the package.
    monkeypatch.setattr(ExtensionManager, "ENTRY_POINT_CACHE", {})
    (text,) = (text for text in code_of("ini") if "enabled_backends" in text)
    (tmp_path / "agent.conf").write_text(text.replace("/var/lib/files", str(directory)))
    conf = options.load([tmp_path / "agent.conf"])
    assert "files" in conf.agent.enabled_backends

    loaded = backends.load(["files"], conf, Host(conf))
    assert loaded.broken == {}
    with (
        agent(tmp_path, backends=loaded.backends) as running,
        served_agent(running) as url,
        caller(url) as client,
    ):
        spec = make_spec(backend="files").model_dump(mode="json")
        answer = client.put("/v1/ports/a", json=spec)
        assert (answer.status_code, answer.json()["state"]) == (200, "active"), answer.text
        assert answer.json()["binding"]["file"] == str(directory / "a")
        assert (directory / "a").read_text().startswith(f"{MARK}a\n")
        refused = client.put("/v1/ports/b", json=spec | {"qos": {"egress_kbps": 100_000}})
        assert refused.json()["code"] == Unsupported.code
        assert client.delete("/v1/ports/a").status_code == 204
    assert list(directory.iterdir()) == []
    assert f"netplugin_files:{list_opts.__name__}" in setup
    assert list_opts()[0][0] == GROUP


# -- a field by the book -------------------------------------------------------------------------


class WiderFeatures(Features):
    colour: bool = False


class WiderSpec(PortSpec):
    colour: Annotated[
        Literal["red", "blue"],
        FieldRule(live=True, supported=lambda spec, features: features.colour),
    ] = "red"


class PlainFiles(Files):
    """The example, which knows nothing of the new field; ``Features`` has it."""

    features: ClassVar[Features] = WiderFeatures(networks=("flat",))


class ColourFiles(Files):
    """A backend that has the feature, and so must write the field."""

    features: ClassVar[Features] = WiderFeatures(networks=("flat",), colour=True)

    def text_of(self, intent: Intent) -> str:
        assert isinstance(intent.spec, WiderSpec)
        return f"{super().text_of(intent)}colour={intent.spec.colour}\n"


def test_a_field_by_the_book_is_refused_by_a_backend_that_does_not_have_it(
    conf: Any, start: Callable[..., Example], directory: Path
) -> None:
    field = textwrap.dedent(inspect.getsource(WiderSpec).partition("\n")[2])
    assert field in code_of("python")

    example = start(PlainFiles)
    assert example.put("a", wider()).state is PortState.ACTIVE
    with pytest.raises(Unsupported, match="has no colour"):
        example.put("b", wider(colour="blue"))
    with pytest.raises(Unsupported, match="has no colour"):
        example.put("a", wider(colour="blue"))
    assert [file.name for file in directory.iterdir()] == ["a"]
    assert [record.port_id for record in example.store.records()] == ["a"]

    example.delete("a")
    example = start(ColourFiles)
    example.put("b", wider(colour="blue"))
    example.put("b", wider())
    assert (directory / "b").read_text().endswith("colour=red\n")


def wider(**fields: Any) -> WiderSpec:
    return WiderSpec.model_validate({**make_spec(backend="files").model_dump(), **fields})

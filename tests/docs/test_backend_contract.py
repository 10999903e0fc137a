"""The tests that a backend inherits: they hold for one with claims, and find what is wrong with a backend."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest

from netplugin.api.errors import NetpluginError
from netplugin.api.models import Features, PortSpec
from netplugin.backend import Applied, Backend, Change, Intent, Plan
from tests.docs import test_example_contract as example
from tests.docs.backend_contract import ASKS, configuration
from tests.docs.example_backend import MARK, Files, FilesSeen, RemoveFile, WriteFile
from tests.docs.example_claims import Slots


class TestSlots(example.TestFiles):
    kind = Slots

    def damage(self, conf: Any, port_id: str) -> None:
        (Path(conf.files.directory) / "0").write_text(f"{MARK}{port_id}\n")

    def occupy(self, conf: Any, port_id: str) -> None:
        super().occupy(conf, "0")


class Idle(Files):
    def apply(self, changes: Sequence[Change], deadline: float) -> Applied:
        return Applied()


class Keeping(Files):
    """It never writes a file again."""

    def plan(self, intents: Sequence[Intent], observed: FilesSeen) -> Plan:
        plan = super().plan(intents, observed)
        there = observed.texts.keys()
        return Plan(tuple(c for c in plan.changes if getattr(c, "file", "") not in there), plan.refused)


class Leaving(Files):
    """It never removes a file."""

    def plan(self, intents: Sequence[Intent], observed: FilesSeen) -> Plan:
        plan = super().plan(intents, observed)
        return Plan(tuple(c for c in plan.changes if not isinstance(c, RemoveFile)), plan.refused)


class Taking(Files):
    """It takes the file of a stranger."""

    def plan(self, intents: Sequence[Intent], observed: FilesSeen) -> Plan:
        return super().plan(intents, FilesSeen(observed.ports, texts=_marked(observed.texts, intents)))


class Unsorted(Files):
    def plan(self, intents: Sequence[Intent], observed: FilesSeen) -> Plan:
        plans = [super(Unsorted, self).plan([intent], observed) for intent in intents]
        return Plan(tuple(change for plan in plans for change in plan.changes))


class Nameless(Files):
    """Its changes are those of no port."""

    def plan(self, intents: Sequence[Intent], observed: FilesSeen) -> Plan:
        changes = super().plan(intents, observed).changes
        return Plan(tuple(WriteFile((), c.file, c.text) for c in changes if isinstance(c, WriteFile)))


class Wide(Files):
    """It reports all ports, whatever it was asked for."""

    def observe(self, ports: Collection[str] | None, deadline: float) -> FilesSeen:
        return super().observe(None, deadline)


class Forgetful(Files):
    """It reports no port that it has not made itself."""

    def observe(self, ports: Collection[str] | None, deadline: float) -> FilesSeen:
        return FilesSeen({}, texts=super().observe(ports, deadline).texts)


class Open(Files):
    """It accepts a filter, which it does not have."""

    def validate(self, spec: PortSpec) -> None:
        Backend.validate(self, spec)


class Silent(Files):
    def validate(self, spec: PortSpec) -> None:
        return


def _marked(texts: Any, intents: Sequence[Intent]) -> dict[str, str]:
    ports = {intent.port_id for intent in intents}
    return {
        file: text if text.startswith(MARK) or file not in ports else f"{MARK}{file}"
        for file, text in texts.items()
    }


@pytest.mark.parametrize(
    ("kind", "test"),
    [
        (Idle, "test_a_port_is_made_and_read_back"),
        (Keeping, "test_a_change_is_made_on_the_host"),
        (Keeping, "test_drift_is_found_and_repaired"),
        (Leaving, "test_a_removed_port_leaves_nothing"),
        (Taking, "test_what_is_not_the_backends_stays"),
        (Unsorted, "test_the_order_of_intents_does_not_matter"),
        (Nameless, "test_a_change_is_of_its_ports"),
        (Wide, "test_an_observation_of_some_ports_has_no_others"),
        (Forgetful, "test_a_port_that_the_store_has_lost_stays"),
        (Open, "test_what_it_has_no_feature_for_is_refused"),
        (Silent, "test_what_it_has_no_feature_for_is_refused"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_wrong_backend_fails(
    kind: type[Files], test: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contract = example.TestFiles()
    (tmp_path / "files").mkdir()
    conf = configuration(tmp_path, f"[files]\ndirectory = {tmp_path / 'files'}\n")
    for each, holds in ((Files, True), (kind, False)):
        monkeypatch.setattr(example.TestFiles, "kind", each)
        directory = tmp_path / each.__name__
        directory.mkdir()
        driven = contract.start(conf, directory)
        given = {"driven": driven, "conf": conf, "tmp_path": directory}
        method = getattr(contract, test)
        arguments = {name: given[name] for name in inspect.signature(method).parameters}
        try:
            if holds:
                method(**arguments)
            else:
                with pytest.raises((AssertionError, NetpluginError, pytest.fail.Exception)):
                    method(**arguments)
        finally:
            driven.close()
        for file in (tmp_path / "files").iterdir():
            file.unlink()


def test_each_field_that_needs_a_feature_is_requested() -> None:
    spec = example.TestFiles().make_spec()
    optional = {n for n, field in PortSpec.model_fields.items() if not field.is_required()}
    rules = PortSpec.rules()
    assert {n for n in optional if not rules[n].supported(spec, Features())} == set(ASKS)

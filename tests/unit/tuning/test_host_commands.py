"""The commands ``netplugin host ...``, run in this process on a machine that is a folder."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from netplugin.cli.main import main
from netplugin.tuning.intent import HostIntent
from tests.unit.tuning.machines import load
from tests.unit.tuning.trees import tree


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("small")
    tree(load("small")).write(root)
    return root


def run(line: str) -> int:
    try:
        return main(shlex.split(line))
    except SystemExit as ended:
        return int(ended.code or 0)


def test_facts(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"host facts --root {small} -f json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["cpus"]["online"] == "0-1"
    assert facts["live"]["ovs"] == {"unknown": "was not asked", "path": "ovs-vswitchd"}
    assert run(f"host facts --root {small}") == 0
    assert "online: 0-1" in capsys.readouterr().out


def test_facts_begin_with_a_summary(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"host facts --root {small}") == 0
    first = [line.split("|")[2].strip() for line in capsys.readouterr().out.splitlines()[3:9]]
    assert first[0].startswith("CPUs: 2 online, 2 cores, NUMA nodes: 1, SMT ")
    assert first[1].startswith("memory: ") and "hugepages" in first[1]
    assert first[2].startswith("kernel: ") and ", IOMMU " in first[2]
    assert any(line == "OVS: not running (was not asked)" for line in first)
    assert run(f"host facts --root {small} -c summary -f value") == 0
    assert capsys.readouterr().out.count("\n") == 1


def test_facts_of_a_folder_that_is_no_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"host facts --root {tmp_path / 'gone'} -f json") == 0
    assert json.loads(capsys.readouterr().out)["cpus"]["online"]["unknown"] == "there is no such file"


@pytest.mark.parametrize(
    ("options", "status"),
    [("", 0), ("--pmd-cores 1", 1)],
    ids=["nothing fails", "hugepages are missing"],
)
def test_the_exit_status_of_check(
    small: Path, capsys: pytest.CaptureFixture[str], options: str, status: int
) -> None:
    assert run(f"host check --root {small} {options} -f json") == status
    findings = json.loads(capsys.readouterr().out)
    assert set(findings[0]) == {"id", "status", "found", "expected", "fix"}
    assert ("fail" in {finding["status"] for finding in findings}) == bool(status)


def test_check_without_a_plan_reports_it(
    small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(f"host check --root {small}") == 0
    shown = capsys.readouterr()
    assert "| status |" in shown.out
    assert "no plan was given" in shown.err and "--pmd-cores" in shown.err
    assert shown.err.count("\n") == 1
    run(f"host check --root {small} --pmd-cores 1")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("netplugin.cli.host_tuning.check", lambda scene: ())
    assert run(f"host check --root {small}") == 0
    nothing, plan = capsys.readouterr().err.splitlines()
    assert "no findings" in nothing and "no plan was given" in plan


def test_a_plan_in_each_form(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed: dict[str, str] = {}
    for form in ("text", "json", "ansible"):
        assert run(f"host plan --root {small} --pmd-cores 1 -f {form}") == 0
        printed[form] = capsys.readouterr().out
    assert "  H0   P1\n" in printed["text"]
    plan = json.loads(printed["json"])
    assert plan["intent"]["pmd_cores"] == 1 and plan["partition"]["polling"] == "1"
    step = next(s for s in plan["steps"] if s["target"].get("name") == "isolcpus")
    assert (step["now"], step["desired"], step["effect"]) == (None, "managed_irq,domain,1", "reboot")
    assert step["done"] is False and step["target"]["kind"] == "kernel-argument"
    assert plan["partition"]["housekeeping"] == "0" and plan["partition"]["isolated"] == "1"
    assert yaml.safe_load(printed["ansible"])[0]["hosts"] == "all"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--pmd-cores 2", "pmd_cores: 2 whole cores"),
        ("--pmd-cores some", "pmd_cores: must be a whole number"),
        (
            "--pmd-cores 1 --mtu 1500 --mtu 10",
            "mtus.1: must be at least 68",
        ),
        ("--pmd-cores 1 --nic eth7", "there is no NIC eth7"),
    ],
)
def test_a_plan_that_cannot_be_made_is_a_sentence(
    small: Path, capsys: pytest.CaptureFixture[str], options: str, words: str
) -> None:
    assert run(f"host plan --root {small} {options}") == 1
    shown: Any = capsys.readouterr()
    assert shown.out == "" and words in shown.err and "Traceback" not in shown.err


def test_a_plan_wants_to_know_the_pmd_cores(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"host plan --root {small}") == 1
    shown = capsys.readouterr()
    assert shown.out == "" and "pmd_cores: " in shown.err and "--pmd-cores" in shown.err


def test_options_lie_over_the_configuration(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "netplugin.conf"
    file.write_text("[host]\npmd_cores = 1\nrealtime = true\nmtus = 9000,1500\nqueues = 2\n")
    plan = f"host plan --root {small} --config-file {file} -f json"

    def intent(more: str = "") -> dict[str, Any]:
        assert run(f"{plan} {more}") == 0
        desired: dict[str, Any] = json.loads(capsys.readouterr().out)["intent"]
        return desired

    configured = intent()
    assert (configured["pmd_cores"], configured["realtime"], configured["queues"]) == (1, True, 2)
    assert configured["mtus"] == [9000, 1500]
    asked = intent("--no-realtime --mtu 2000 --pmd-cores 0")
    assert (asked["pmd_cores"], asked["realtime"], asked["mtus"]) == (0, False, [2000])
    assert asked["queues"] == 2

    assert run(f"host check --root {small} --config-file {file} -f json") == 1
    assert "plan-kernel-arguments" in {f["id"] for f in json.loads(capsys.readouterr().out)}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[host]\npmd_cores = many\n", "pmd_cores"),
        ("[host]\npmd_cores = 1\nlinks = -1\n", "links: "),
        ("pmd_cores = 1\n", "netplugin.conf"),
        (None, "netplugin.conf"),
    ],
    ids=["no number", "out of range", "no group", "no file"],
)
def test_a_configuration_that_is_wrong_is_a_sentence(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, words: str
) -> None:
    file = tmp_path / "netplugin.conf"
    if text:
        file.write_text(text)
    assert run(f"host check --root {small} --config-file {file}") == 1
    shown = capsys.readouterr()
    assert shown.out == "" and words in shown.err and "Traceback" not in shown.err


def test_every_field_of_an_intent_is_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("help host plan") == 0
    shown = capsys.readouterr().out
    for name, field in HostIntent.model_fields.items():
        option = "--" + {"nics": "nic", "mtus": "mtu"}.get(name, name).replace("_", "-")
        assert option in shown
        assert field.description and field.description.split()[0] in shown

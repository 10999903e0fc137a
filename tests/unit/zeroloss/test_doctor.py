"""`zeroloss doctor`: what is missing on this host, each with what mends it, and what is there."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path

import pytest
from netplugin_zeroloss.cli import doctor
from netplugin_zeroloss.cli.main import main
from netplugin_zeroloss.matrix.agent_bench import AgentBench

from netplugin.api.client import Readiness
from netplugin.api.models import BackendInfo, Finding
from tests.unit.tuning.golden import facts_of
from tests.unit.zeroloss.made_up_agent import PLAN, MadeUpAgent
from tests.unit.zeroloss.matrix_runs import ROOT, described, write
from tests.unit.zeroloss.published_host import PublishedHost

_FAILED = Finding(
    id="iommu", status="fail", found="the IOMMU is off", expected="on", fix="intel_iommu=on, and a reboot"
)
_WARNED = _FAILED.model_copy(update={"status": "warn", "found": "only a warning"})


@pytest.fixture
def host(tmp_path: Path, agent: MadeUpAgent, monkeypatch: pytest.MonkeyPatch) -> PublishedHost:
    """The published host, with all that is needed."""
    made = PublishedHost(tmp_path, agent, monkeypatch)
    monkeypatch.setattr(doctor, "client", lambda description: agent)
    monkeypatch.setattr(doctor.Client, "from_environment", classmethod(lambda cls: agent))
    monkeypatch.setattr(doctor, "read_facts", lambda root: facts_of("published"))
    monkeypatch.setattr(doctor, "find_spec", lambda name: name)
    monkeypatch.setattr(doctor, "FOLDER", made.image.parent)
    made.programs |= {"ovs-appctl", "dpdk-testpmd"}
    return made


def _lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_each_line_that_says_what_is_missing_is_followed_by_what_mends_it(
    host: PublishedHost, capsys: pytest.CaptureFixture[str]
) -> None:
    host.packages.clear()
    host.programs.remove("virsh")
    host.agent.findings = [PLAN, _FAILED, _WARNED]
    host.agent.infos[0] = BackendInfo(name="dpdkvhostuser", usable=False, reason="no DPDK", fix="dpdk-init")
    assert main(["doctor"]) == 1
    lines = _lines(capsys)
    pairs = [pair for pair in pairwise(lines) if pair[0].startswith("missing ")]
    fixes = {
        "virsh is not installed": "apt-get install libvirt-clients",
        "vpp-papi is not installed": "pip install './tools/trex[vpp]'",
        "dpdkvhostuser: no DPDK": "dpdk-init",
        "the IOMMU is off": "intel_iommu=on, and a reboot",
    }
    assert len(pairs) == len(fixes) and lines[-1] == f"{len(fixes)} missing"
    for found, fix in fixes.items():
        [mend] = [mend for line, mend in pairs if found in line]
        assert mend.strip().startswith("fix: ") and fix in mend
    printed = "\n".join(lines)
    assert "only a warning" not in printed
    assert "8 PMD cores are CPUs 1-8" in printed and "sriov is usable" in printed


def _copied(host: PublishedHost, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the shipped description for the image of ``host``.

    ``doctor`` reads this machine's /sys, which has nothing of that host: here it reads the tree of ``host``.
    """
    monkeypatch.setattr(doctor, "AgentBench", lambda run, **more: AgentBench(run, root=host.root, **more))
    file = host.folder / "mine.yaml"
    text = (ROOT / "tools/trex/matrix.yaml").read_text()
    file.write_text(text.replace("/var/lib/netplugin-zeroloss/latest", str(host.image)))
    return file


def test_the_next_command_is_printed_when_nothing_is_missing(
    host: PublishedHost, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = _copied(host, monkeypatch)
    assert main(["doctor", str(file)]) == 0
    lines = _lines(capsys)
    assert f"Next: netplugin-zeroloss matrix {file} --dry-run" in lines[-1]
    assert all(line.startswith("ok ") for line in lines[:-2])
    assert "create" not in (host.folder / "calls").read_text(), "no VM is started"
    assert main(["doctor"]) == 0
    assert "Next: cp tools/trex/matrix.yaml mine.yaml" in _lines(capsys)[-1]


def test_an_image_that_is_missing_is_built_with_programs_that_are_there(
    host: PublishedHost, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(host.image)
    host.programs |= {"mke2fs", "unshare", "ssh-keygen"}
    assert main(["doctor"]) == 1
    lines = _lines(capsys)
    missing = [
        (found.split()[1], fix.strip()) for found, fix in pairwise(lines) if found.startswith("missing ")
    ]
    build = f"fix: netplugin-zeroloss vm build --folder {host.folder}"
    assert missing == [("image", build), ("program", "fix: apt-get install mmdebstrap")]


_IMPOSSIBLE = Finding(
    id="plan", status="fail", found="pmd_cores: 9 whole cores", expected="a plan", fix="fewer pmd_cores"
)


@pytest.mark.parametrize(
    ("findings", "line", "fix"),
    [
        ([], "the host has no CPU plan", "set [host] pmd_cores"),
        ([_IMPOSSIBLE], "pmd_cores: 9 whole cores; expected: a plan", "fewer pmd_cores"),
        ([PLAN.model_copy(update={"status": "warn"})], "CPUs 9-14", "netplugin host check"),
    ],
)
def test_a_host_without_a_plan_for_the_vm(
    host: PublishedHost,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    findings: list[Finding],
    line: str,
    fix: str,
) -> None:
    """Said once, with and without a description; a VM that is not placed needs none."""
    host.agent.findings = findings
    file = _copied(host, monkeypatch)
    for command in (["doctor"], ["doctor", str(file)]):
        assert main(command) == 1
        lines = _lines(capsys)
        [at] = [number for number, each in enumerate(lines) if each.startswith("missing ")]
        assert line in lines[at] and fix in lines[at + 1] and lines[-1] == "1 missing"
    file.write_text(file.read_text().replace("  # policy: {numa_node: 0}", "  policy: {pin: false}"))
    assert main(["doctor", str(file)]) == (findings == [_IMPOSSIBLE]), "the agent itself reports that one"


def test_an_agent_that_is_not_ready_does_not_hide_the_rest(
    host: PublishedHost, capsys: pytest.CaptureFixture[str]
) -> None:
    host.agent.readiness = Readiness(ready=False, reasons=["the store is read-only"])
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "it is not ready: the store is read-only" in printed and "vpp-papi is installed" in printed
    assert "sriov is usable" not in printed


def test_an_agent_that_does_not_run_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NETPLUGIN_URL", f"unix:{tmp_path}/none.sock")
    monkeypatch.setattr(doctor, "read_facts", lambda root: facts_of("published"))
    assert main(["doctor"]) == 1
    lines = _lines(capsys)
    at = next(n for n, line in enumerate(lines) if line.startswith("missing  agent"))
    assert "none.sock" in lines[at] and "fix: " in lines[at + 1]


def test_a_simulation_needs_nothing_and_a_wrong_description_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", str(write(tmp_path, described()))]) == 0
    assert main(["doctor", str(write(tmp_path, described(name="")))]) == 2
    assert "line " in capsys.readouterr().err

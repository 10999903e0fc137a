"""``netplugin host verify --guest`` with a scripted VM: what is kept, what fails how, and nothing is left.

A real VM is in tests/functional/test_verify_guest.py.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from netplugin.api.errors import InvalidRequest, NetpluginError
from netplugin.cli.main import main
from netplugin.host.locks import Locks
from netplugin.libvirt.guest import read_domain
from netplugin.tuning.facts import Facts, Live
from netplugin.tuning.root import known
from netplugin.tuning.verifying import result
from netplugin.tuning.verifying.comparison import FigureVerdict, compare
from netplugin.tuning.verifying.guest.machine import isolated, machine_on, measured_vcpus
from netplugin.tuning.verifying.show import EMULATED, comparison_text, draw_plot
from tests.unit.tuning.golden import facts_of, planned
from tests.unit.tuning.runs import HIGH, LOW, in_a_vm
from tests.unit.tuning.scripted_guest import CYCLICTEST, ScriptedGuest
from tests.unit.zeroloss.images import made_up_image

OPTIONS = "--emulate --rounds 2 --duration 2"


@pytest.fixture
def guest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedGuest:
    return ScriptedGuest(tmp_path / "host", monkeypatch)


def verify(guest: ScriptedGuest, options: str = OPTIONS, image: Path | None = None) -> int:
    words = [
        "host",
        "verify",
        "--guest",
        str(image or guest.image.folder),
        "--results",
        str(guest.home / "r"),
    ]
    try:
        return main([*words, *shlex.split(options)])
    except SystemExit as ended:
        return int(ended.code or 0)


def test_a_run_in_a_vm_is_kept_with_what_the_vm_is(
    guest: ScriptedGuest, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(guest) == 0
    shown = capsys.readouterr()
    assert "In a VM (Debian bookworm, Linux 6.1.0-rt, 2 vCPUs, 1024 MB; not placed)" in shown.out
    assert EMULATED in shown.out and "vCPU" in shown.out
    assert [line.partition(",")[0] for line in shown.err.splitlines()][2:] == ["in the VM"] * 2
    assert guest.called == ["systemctl", "which", "uname", *["cyclictest", "cat"] * 2]
    [kept] = (guest.home / "r").iterdir()
    found = result.read(kept)
    assert found.latency is None and found.guest_latency and len(found.guest_latency.rounds) == 2
    # The isolated vCPU is measured, and cyclictest's own thread runs on the other.
    assert found.guest_latency.settings.cpus == "1"
    assert "--affinity=1 --threads=1 --mainaffinity=0" in (guest.home / "state/called").read_text()
    assert found.guest_latency.overall.overflows == 2 and found.guest_latency.overall.max_us == 3000
    assert found.conditions["guest vCPUs"] == "not placed"
    assert found.conditions["guest kernel"] == "6.1.0-rt" and "kernel" in found.conditions
    assert guest.left() == [] and guest.image.disk.read_text() == "the disk.qcow2\n"


def test_what_a_killed_run_left_is_removed_first(guest: ScriptedGuest) -> None:
    guest.was_killed(guest.image)
    assert verify(guest) == 0
    assert (guest.home / "state/destroyed").exists() and guest.left() == []


@pytest.mark.parametrize(
    ("script", "options", "words"),
    [
        ("refuse", "", "unable to map backing store"),
        ("silent", "--boot 1", "the VM does not answer by SSH"),
        ("dies-booting", "", "the VM ended while it booted"),
        ("dies", "", "the VM ended while cyclictest ran in it"),
        ("fails", "", "cyclictest in the VM: ?[31mcyclictest: no memory"),
        ("lacks", "", "the VM has no cyclictest"),
        ("floods", "", "cat in the VM prints more than 16 MB"),
    ],
)
def test_a_vm_that_fails_is_a_sentence_and_leaves_nothing(
    guest: ScriptedGuest, capsys: pytest.CaptureFixture[str], script: str, options: str, words: str
) -> None:
    guest.script(script)
    assert verify(guest, f"{OPTIONS} {options}") == 1
    shown = capsys.readouterr()
    assert words in shown.err and "Traceback" not in shown.err and shown.out == ""
    assert guest.left() == [] and list((guest.home / "r").iterdir()) == []


def other(**fields: object) -> str:
    """cyclictest's output with these fields of its thread."""
    return json.dumps(CYCLICTEST | {"thread": {"0": CYCLICTEST["thread"]["0"] | fields}})  # type: ignore[index]


@pytest.mark.parametrize(
    ("printed", "words"),
    [
        ("\x1b[2Jno json", "cannot be made sense of"),
        ("", "cannot be made sense of"),
        ("[" * 100_000, "cannot be made sense of"),
        ("{}", "cannot be made sense of"),
        (other(cpu=0), "measured CPUs [0], not 1"),
        (other(histogram={"5": -90}), "fewer than no samples"),
        (other(histogram={}, cycles=0), "a CPU has no samples"),
        (other(min="soon"), "cannot be made sense of"),
    ],
)
def test_a_vm_that_prints_garbage_is_not_believed(
    guest: ScriptedGuest, capsys: pytest.CaptureFixture[str], printed: str, words: str
) -> None:
    guest.script("cyclictest.json", printed)
    assert verify(guest) == 1
    shown = capsys.readouterr().err
    assert words in shown and "Traceback" not in shown and "\x1b" not in shown
    assert guest.left() == []


def test_an_image_that_was_written_is_told(guest: ScriptedGuest, capsys: pytest.CaptureFixture[str]) -> None:
    guest.script("writes-base", str(guest.image.disk))
    assert verify(guest) == 1
    assert "is no image any more" in capsys.readouterr().err


def test_one_run_at_a_time(guest: ScriptedGuest, capsys: pytest.CaptureFixture[str]) -> None:
    locks = Locks()
    try:
        if locks.take("verify-guest") is not None:
            pytest.skip("another run on this machine has the lock")
        assert verify(guest) == 1
    finally:
        locks.close()
    assert "measures in a VM now" in capsys.readouterr().err
    assert guest.left() == [] and guest.called == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--cpus 2", "cpus: 2 is no list of the VM's vCPUs, which are 0-1"),
        ("--cpus x", "cpus: x is no list of the VM's vCPUs"),
        ("--only throughput", "the testpmd loop is measured on the host"),
        ("--loop-cpus 0,1", "the testpmd loop is measured on the host"),
        ("--guest /nonexistent", "there is no image of the VM: No such file or directory. Fix: build one"),
    ],
)
def test_what_cannot_be_is_said_before_a_vm_is_started(
    guest: ScriptedGuest, capsys: pytest.CaptureFixture[str], options: str, words: str
) -> None:
    assert verify(guest, f"{OPTIONS} {options}") == 1
    assert words in capsys.readouterr().err.replace("\n", " ")
    assert guest.called == [] and not (guest.home / "state/domain.xml").exists()


def test_an_image_without_the_program_is_refused(
    guest: ScriptedGuest, capsys: pytest.CaptureFixture[str]
) -> None:
    image = made_up_image(guest.home / "other", packages={"dpdk-dev": "22.11"})
    assert verify(guest, OPTIONS, image.folder) == 1
    assert "netplugin-zeroloss vm build --package rt-tests" in capsys.readouterr().err
    assert guest.called == []


# -- the VM, purely --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "cpus"),
    [
        ("isolcpus=managed_irq,domain,2-7 quiet", set(range(2, 8))),
        ("isolcpus=1", {1}),
        ("root=/dev/vda", set()),
        ("isolcpus=", set()),
        ("isolcpus=1-x", set()),
        ("isolcpus=1 isolcpus=nohz,3", {3}),
    ],
)
def test_the_isolated_vcpus_of_a_command_line(arguments: str, cpus: set[int]) -> None:
    assert isolated(arguments) == cpus


def test_all_vcpus_are_measured_if_none_is_isolated(tmp_path: Path) -> None:
    image = made_up_image(tmp_path / "image")
    assert measured_vcpus(image, None) == "0-7"
    assert measured_vcpus(image, "1,3") == "1,3"
    with pytest.raises(InvalidRequest):
        measured_vcpus(image, "")


@pytest.mark.parametrize("realtime", [False, True])
def test_a_plan_places_the_vm(tmp_path: Path, realtime: bool) -> None:
    image = made_up_image(tmp_path / "image")
    facts = facts_of("published")
    plan = planned("published", pmd_cores=2, vm_cores=8, vm_memory_mb=65536, realtime=realtime)
    with pytest.raises(NetpluginError, match=r"capacity_exhausted|conflict"):
        machine_on(image, 2222, False, plan, facts, Live())  # this machine has no hugepages yet
    roomy = with_pages(facts)
    made = machine_on(image, 2222, False, plan, roomy, Live())
    assert len(set(made.pins.values())) == 8 and set(made.pins.values()) <= plan.partition.vcpus
    there = read_domain(made.xml)
    assert there.name == "netplugin-verify" and "hostfwd=tcp:127.0.0.1:2222-:22" in made.xml
    assert ("vcpusched" in made.xml) is realtime is made.realtime
    bare = machine_on(image, 2222, True, None, facts, Live())
    assert bare.pins == {} and "vcpupin" not in bare.xml and 'type="qemu"' in bare.xml


def with_pages(facts: Facts) -> Facts:
    pools = tuple(replace(pool, total=1 << 16, free=1 << 16) for pool in known(facts.memory.pools, ()))
    return replace(facts, memory=replace(facts.memory, pools=pools))


# -- figures of VMs --------------------------------------------------------------------------------


def test_figures_of_vms_are_compared_as_those_of_hosts() -> None:
    found = compare(in_a_vm("before", HIGH), in_a_vm("after", LOW))
    better = {row.figure.name for row in found.of(FigureVerdict.BETTER)}
    assert "guest latency maximum" in better and not any(name.startswith("latency") for name in better)
    text = comparison_text(found)
    assert "6/6" in text and EMULATED not in text


def test_an_emulated_vm_is_not_compared_with_one_of_kvm() -> None:
    found = compare(in_a_vm("before", HIGH, emulated=True), in_a_vm("after", LOW))
    assert {row.finding for row in found.rows} == {FigureVerdict.UNTOLD}
    assert "the VM's processor is emulated in one and KVM's in the other" in comparison_text(found)
    assert EMULATED in comparison_text(found)


def test_the_plot_has_a_panel_for_the_vm(tmp_path: Path) -> None:
    found = compare(in_a_vm("before", HIGH, emulated=True), in_a_vm("after", LOW, emulated=True))
    draw_plot(found, tmp_path / "p.svg")
    assert "in the VM (cyclictest, emulated: no measure)" in (tmp_path / "p.svg").read_text()

"""``netplugin host verify effect`` on a scripted host: what each call does, keeps, and says is next.

Applying really changes the machine, and a reboot ends a test, so both are scripted.
"""

from __future__ import annotations

import shlex
import uuid
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from netplugin.api.errors import HostError
from netplugin.cli import host_verify_effect
from netplugin.cli.host_verify_effect import WAITS, options_text
from netplugin.cli.main import main
from netplugin.host.locks import Locks
from netplugin.tuning.applying.apply import Result, StepOutcome
from netplugin.tuning.intent import HostIntent
from netplugin.tuning.steps import Group, KernelArgument, Sysctl
from netplugin.tuning.verifying import effect, result
from netplugin.tuning.verifying.options import Options
from netplugin.tuning.verifying.result import MeasuredRun
from tests.unit.tuning.runs import FAST, HIGH, LOW, SLOW, in_a_vm, run, throughput

BEGIN = "--yes --pmd-cores 2 --realtime --mtu 1500 --mtu 9000 --rounds 6 --label x"
SET = Result(Group.WATCHDOG, Sysctl("kernel.nmi_watchdog"), "1", "0", StepOutcome.SET)
LATER = Result(Group.KERNEL_ARGUMENTS, KernelArgument("isolcpus"), None, "2-7", StepOutcome.NEEDS_REBOOT)
REFUSED = Result(
    Group.WATCHDOG,
    Sysctl("kernel.watchdog"),
    "1",
    "0",
    StepOutcome.FAILED,
    "host_error",
    "read-only",
    "mount it",
)


class ScriptedHost:
    """``steps``: what each apply finds to do; ``fails``: the measurement that fails."""

    def __init__(self, *steps: Sequence[Result]) -> None:
        self.steps = list(steps)
        self.fails = ""
        self.samples = {"before": SLOW, "after": FAST}
        self.done: list[str] = []
        self.options: list[Options] = []
        self.intents: list[HostIntent] = []
        self.folder = Path()
        self.say: Callable[[str], None] = lambda text: None

    def __call__(self, parsed_args: Namespace, say: Callable[[str], None]) -> ScriptedHost:
        self.folder, self.say = parsed_args.results, say
        return self

    def measure(self, options: Options, intent: HostIntent) -> tuple[Path, MeasuredRun]:
        when = options.label.rpartition("-")[2]
        self.done.append(when)
        self.options.append(options)
        self.intents.append(intent)
        if when == self.fails:
            raise HostError("the machine is on fire", step="verify")
        if options.guest is not None:
            found = in_a_vm(options.label, {"before": HIGH, "after": LOW}[when])
        else:
            found = run(options.label, throughput=throughput(self.samples[when]))
        return result.write(self.folder, found), found

    def apply(self, intent: HostIntent) -> Sequence[Result]:
        self.done.append("apply")
        self.intents.append(intent)
        return self.steps.pop(0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # A lock of its own: the same tests may run twice on this machine.
    monkeypatch.setattr(host_verify_effect, "_LOCK", f"effect-{uuid.uuid4()}")
    return tmp_path / "runs"


def call(host: ScriptedHost, folder: Path, options: str, monkeypatch: pytest.MonkeyPatch) -> int:
    # The real one changes this machine; a real apply is in tests/functional/alone.
    monkeypatch.setattr(host_verify_effect, "_ThisHost", host)
    try:
        return main(["host", "verify", "effect", "--results", str(folder), *shlex.split(options)])
    except SystemExit as ended:
        return int(ended.code or 0)


def test_without_a_reboot_one_call_does_it_all(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    host = ScriptedHost([SET])
    assert call(host, folder, f"{BEGIN} --guest /vm/latest", monkeypatch) == 0
    shown = capsys.readouterr().out
    assert host.done == ["before", "apply", "after"]
    assert "Effect of: netplugin host apply --pmd-cores 2 --mtu 1500 --mtu 9000 --realtime" in shown
    assert "before: In a VM (Debian bookworm" in shown
    assert "6/6" in shown and "Better: guest latency average, guest latency maximum." in shown
    [page] = folder.glob("*-effect.txt")
    assert page.read_text() in shown and not (folder / effect.STATE).exists()
    assert [each.label for each in host.options] == ["x-before", "x-after"]
    # Before, the VM is as on a host without a plan; after, it is placed, and on the same CPUs is measured.
    assert [each.unplaced for each in host.options] == [True, False]
    assert [each.cpus for each in host.options] == [None, "2"]
    assert host.intents == [HostIntent(pmd_cores=2, realtime=True, mtus=(1500, 9000))] * 3


def test_a_reboot_comes_between(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    host = ScriptedHost([SET, LATER], [LATER], [SET])
    assert call(host, folder, BEGIN, monkeypatch) == WAITS
    shown = capsys.readouterr().out
    assert "kernel argument isolcpus: not set -> 2-7: left to do, with a reboot" in shown
    assert "netplugin host plan --pmd-cores 2 --mtu 1500 --mtu 9000 --realtime -f ansible > tune.yml" in shown
    assert f"netplugin host verify effect --results {folder}" in shown
    # Without the reboot, or with one that lacked the arguments, the same is next.
    assert call(host, folder, "", monkeypatch) == WAITS
    assert call(host, folder, "", monkeypatch) == 0
    assert host.done == ["before", "apply", "apply", "apply", "after"], "before is measured once"
    assert "Better: throughput." in capsys.readouterr().out


def test_without_the_reboot_what_is_in_effect_is_measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    host = ScriptedHost([LATER])
    host.samples = {"before": FAST, "after": SLOW}
    assert call(host, folder, f"{BEGIN} --go-on -f json", monkeypatch) == 1, "a figure is worse"
    assert '"verdict": "Worse: throughput.' in capsys.readouterr().out


def test_it_goes_on_in_another_directory(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    host = ScriptedHost([LATER], [])
    monkeypatch.chdir(tmp_path)
    assert call(host, Path("runs"), f"{BEGIN} --guest image", monkeypatch) == WAITS
    assert f"effect --results {folder}" in capsys.readouterr().out
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert call(host, folder, "", monkeypatch) == 0
    assert {each.guest for each in host.options} == {tmp_path / "image"}


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_measurement_that_fails_is_taken_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], when: str
) -> None:
    host = ScriptedHost([SET], [])
    host.fails = when
    assert call(host, folder, BEGIN, monkeypatch) == 1
    assert "the machine is on fire" in capsys.readouterr().err and (folder / effect.STATE).exists()
    host.fails = ""
    assert call(host, folder, "", monkeypatch) == 0
    assert host.done.count("before") == (2 if when == "before" else 1)


def test_a_refused_step_ends_it_before_the_second_measurement(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    host = ScriptedHost([SET, REFUSED])
    assert call(host, folder, BEGIN, monkeypatch) == 1
    assert "not set: sysctl kernel.watchdog" in capsys.readouterr().err
    assert host.done == ["before", "apply"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--rounds 3", "rounds: 3, and what was begun has 6"),
        ("--guest /vm", "guest: /vm, and what was begun has none"),
        ("--pmd-cores 3", "the plan is another"),
        ("--rounds 0", "rounds: must be at least 1"),
    ],
)
def test_what_was_begun_is_not_changed(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: str,
    words: str,
) -> None:
    host = ScriptedHost([LATER], [])
    assert call(host, folder, BEGIN, monkeypatch) == WAITS
    assert call(host, folder, options, monkeypatch) == 1
    assert words in capsys.readouterr().err and host.done == ["before", "apply"]
    assert call(host, folder, f"--discard {BEGIN} --rounds 3", monkeypatch) == 0
    assert host.done[2:] == ["before", "apply", "after"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--pmd-cores 2", "yes: this applies a plan"),
        ("--yes", "pmd_cores: there is no plan without it"),
        ("--yes --pmd-cores 2 --root /x", "root: only this machine"),
        ("--yes --pmd-cores 2 --plot p.pdf", "neither PNG nor SVG"),
        (f"--yes --pmd-cores 2 --label {'x' * 64}", "label: "),
    ],
)
def test_what_cannot_begin_changes_nothing(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: str,
    words: str,
) -> None:
    host = ScriptedHost([])
    assert call(host, folder, options, monkeypatch) == 1
    assert words in capsys.readouterr().err and host.done == []
    assert not (folder / effect.STATE).exists()


def test_a_state_that_cannot_be_read_is_reported(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    host = ScriptedHost([])
    folder.mkdir()
    (folder / effect.STATE).write_text('{"format": 2}')
    assert call(host, folder, BEGIN, monkeypatch) == 1
    assert "cannot be read. Fix: begin again: --discard" in capsys.readouterr().err and host.done == []


def test_one_at_a_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    host, locks = ScriptedHost([]), Locks()
    try:
        assert locks.take(host_verify_effect._LOCK) is None
        assert call(host, folder, BEGIN, monkeypatch) == 1
    finally:
        locks.close()
    assert "measures the effect now" in capsys.readouterr().err and host.done == []


def test_options_of_an_intent_give_the_same_intent() -> None:
    intent = HostIntent(
        pmd_cores=0, vm_cores=4, nics=("ens1 f0", "0000:3b:00.0"), vfs=("a=1",), idle_siblings=True
    )
    assert options_text(intent) == (
        "--pmd-cores 0 --vm-cores 4 --idle-siblings --nic 'ens1 f0' --nic 0000:3b:00.0 --vfs a=1"
    )

"""The command ``netplugin host apply``, run in this process on a machine that is a folder."""

from __future__ import annotations

import json
import shlex
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from netplugin.api.errors import BackendUnavailable, HostError, NetpluginError, Overloaded
from netplugin.cli import host_apply
from netplugin.cli.host_apply import ports_with_vfs
from netplugin.cli.main import main
from netplugin.tuning.applying.apply import BAD, Result, StepOutcome
from netplugin.tuning.applying.journal import ApplyJournal
from netplugin.tuning.root import Unknown
from netplugin.tuning.steps import File, Group, Swap
from tests.unit.agent import answering, served
from tests.unit.tuning.fake_kernel import IFACE
from tests.unit.tuning.fake_machine import described
from tests.unit.tuning.trees import tree

BOOT = "/proc/sys/kernel/random/boot_id"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tree(described())
    made.files[BOOT] = "first\n"
    made.write(tmp_path / "machine")
    return tmp_path / "machine"


def run(line: str) -> int:
    try:
        return main(shlex.split(line))
    except SystemExit as ended:
        return int(ended.code or 0)


def content(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_without_yes_it_says_what_it_would_do(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, journal = content(folder), tmp_path / "journal"
    command = f"host apply --root {folder} --pmd-cores 1 --vfs {IFACE}=4 --journal {journal}"
    assert run(command) == 0
    shown = capsys.readouterr().out
    assert "[interrupts] /proc/irq/24/smp_affinity_list: 0-1 -> 0: would be set\n" in shown
    assert "[vfs] virtual functions of 0000:05:00.0: 0 -> 4: would be set\n" in shown
    assert "kernel argument nohz_full: not set -> 1: left to do, with a reboot\n" in shown
    assert shown.endswith("\nNothing was changed; --yes applies it.\n")
    assert run(f"{command} -f json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["outcome"] for row in rows} == {"would-set", "needs-ovs-restart", "needs-reboot"}
    assert set(rows[0]) == {"group", "target", "old", "new", "outcome", "code", "reason", "fix"}
    assert content(folder) == before and not journal.exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("", "pmd_cores: there is no plan without it"),
        ("--pmd-cores 1 --yes", "root: only this machine can be changed"),
        ("--pmd-cores 1 --force", "force: there is nothing to force"),
        ("--undo --yes", "root: only this machine can be changed"),
        (f"--pmd-cores 1 --vfs {IFACE}=9", "vfs: "),
        ("--pmd-cores 1 --vfs 9", "vfs.0: "),
    ],
)
def test_what_cannot_be_done_is_a_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], options: str, words: str
) -> None:
    before = content(folder)
    assert run(f"host apply --root {folder} {options}") == 1
    shown = capsys.readouterr()
    assert shown.out == "" and words in shown.err and "Traceback" not in shown.err
    assert content(folder) == before


def test_an_undo_of_nothing(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"host apply --root {folder} --undo --journal {tmp_path / 'none'} -f json") == 0
    assert json.loads(capsys.readouterr().out) == []
    assert run(f"host apply --root {folder} --undo --journal {tmp_path / 'none'}") == 0
    assert capsys.readouterr().out == "Nothing to do.\n"


def test_an_undo_is_shown_from_the_journal_alone(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    irq = File("/proc/irq/24/smp_affinity_list", lasting=False)
    with ApplyJournal(tmp_path / "journal", "first") as journal:
        journal.writing(Group.INTERRUPTS, irq, "0", "0-1")
        journal.writing(Group.MEMORY, Swap(), "/dev/dm-9 -2", None)
    (folder / "proc/meminfo").unlink(missing_ok=True)
    (folder / "sys/devices/system/cpu/online").write_text("garbage")
    assert run(f"host apply --root {folder} --undo --journal {tmp_path / 'journal'}") == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown == [
        "[memory] swap: /dev/dm-1 -> /dev/dm-9: would be put back",
        f"[interrupts] {irq.path}: 0-1 -> 0: would be put back",
        "Nothing was changed; --yes applies it.",
    ]


@pytest.mark.parametrize("outcome", StepOutcome)
def test_the_exit_status(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    outcome: StepOutcome,
) -> None:
    def results(plan: object) -> Iterator[Result]:
        yield Result(Group.OVS, Swap(), Unknown("x", "why not"), None, outcome, None, "a reason", "a fix")
        yield Result(Group.OVS, Swap(), "b", "c", StepOutcome.SET)

    monkeypatch.setattr(host_apply, "preview", results)
    assert run(f"host apply --root {folder} --pmd-cores 1") == (1 if outcome in BAD else 0)
    first, second, last = capsys.readouterr().out.splitlines()
    assert last == "Nothing was changed; --yes applies it."
    assert first.startswith("[ovs] swap: unknown (x: why not) -> not set: ")
    assert first.endswith(": a reason. Fix: a fix") and second == "[ovs] swap: b -> c: set"


# -- the agent -----------------------------------------------------------------------------------------


def ports(url: str, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, str]:
    monkeypatch.setenv("NETPLUGIN_URL", url)
    return ports_with_vfs(lambda text: print(text, file=sys.stderr))


def test_an_agent_that_does_not_run_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ports("http://127.0.0.1:1", monkeypatch) == {}
    assert "not asked which ports have VFs" in capsys.readouterr().err


@pytest.mark.parametrize("failure", [BackendUnavailable, Overloaded])
def test_an_agent_that_runs_and_cannot_say_is_an_error(
    failure: type[NetpluginError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """OVS may be away, or the agent stop: its ports have their VFs all the same."""
    problem = failure("not now", step="observe").problem().model_dump()
    with served(answering(503, problem)) as url, pytest.raises(failure):
        ports(url, monkeypatch)


def test_a_connection_that_is_cut_off_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        cutting = threading.Thread(target=lambda: listener.accept()[0].close())
        cutting.start()
        with pytest.raises(BackendUnavailable):
            ports(f"http://127.0.0.1:{listener.getsockname()[1]}", monkeypatch)
        cutting.join(30)


def test_an_agent_that_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(answering(500, "oh")) as url, pytest.raises(HostError):
        ports(url, monkeypatch)


def test_an_agent_says_whose_vfs_are(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"pci_address": "0000:05:00.1", "state": "claimed", "port_id": "nic1"},
        {"pci_address": "0000:05:00.2", "state": "available"},
    ]
    with served(answering(200, rows)) as url:
        assert ports(url, monkeypatch) == {"0000:05:00.1": "nic1"}

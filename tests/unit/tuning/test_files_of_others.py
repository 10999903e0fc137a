"""A journal and a copy of a host that others have made: refused, or read within itself."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from netplugin.api.errors import HostError
from netplugin.cli.main import main
from netplugin.tuning.applying.accessor import WritableRoot
from netplugin.tuning.applying.apply import TunedMachine, undo
from netplugin.tuning.applying.journal import ApplyJournal, look
from netplugin.tuning.read import read_facts
from netplugin.tuning.root import Root, Unknown

PASSWD = "root:x:0:0::/root:/bin/sh\n"
BANNED = "IRQBALANCE_BANNED_CPULIST"


def written(kind: str, before: str | None, **target: Any) -> str:
    entry = {"event": "writing", "boot": "b", "group": "interrupts", "target": {"kind": kind, **target}}
    return json.dumps(entry | {"before": before, "desired": "1"}) + "\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root/etc/default").mkdir(parents=True)
    (tmp_path / "root/etc/passwd").write_text(PASSWD)
    (tmp_path / "root/etc/default/irqbalance").write_text("A=1\n")
    return tmp_path / "root"


def undone(root: Path, journal: Path) -> list[str]:
    machine = TunedMachine(WritableRoot(root), None, dict, run=lambda *_: "")  # type: ignore[arg-type]
    with ApplyJournal(journal, "b") as opened:
        return [str(result.outcome) for result in undo(machine, opened, force=True)]


@pytest.mark.parametrize(
    "line",
    [
        written("irqbalance-banned-cpus", "evil", path="/etc/passwd"),
        written("irqbalance-banned-cpus", f"{BANNED}=1", path="/etc/default/../passwd"),
        written("irqbalance-banned-cpus", f"{BANNED}=1\nevil", path="/etc/default/irqbalance"),
        written("irqbalance-banned-cpus", "evil", path="/etc/default/irqbalance"),
        written("tuned-variable", None, profile="../passwd\0", name="isolated_cores"),
        written("tuned-variable", None, profile="../../etc/x", name="isolated_cores"),
        written("tuned-variable", None, profile="cpu-partitioning", name="include"),
        written("tuned-variable", "isolated_cores=1\nx=", profile="cpu-partitioning", name="isolated_cores"),
        written("file", "evil", path="/etc/passwd"),
        written("file", "evil", path="/proc/irq/../../etc/passwd"),
        written("file", "evil", path="/proc/irq/1/smp_affinity_list\n"),
        written("file", "1\n2", path="/proc/irq/1/smp_affinity_list"),
        written("sysctl", "|/tmp/evil", name="kernel.core_pattern"),
        written("sysctl", "1", name="kernel/../../../etc/passwd"),
        written("tuned-profile", "--evil"),
        written("tuned-profile", "../../tmp/evil"),
        written("swap", "--all -2"),
        written("vf-count", "1", address="../../../../etc"),
        written("thread-priority", "systemd=1:99", threads="systemd"),
        written("ovs-other-config", "x", key="dpdk-extra"),
        written("file", "1", path=["/etc/passwd"]),
        written("service-cpus", "1"),
    ],
)
def test_a_line_that_no_apply_writes_is_not_undone(root: Path, tmp_path: Path, line: str) -> None:
    journal = tmp_path / "journal"
    journal.write_text(line)
    journal.chmod(0o600)
    with pytest.raises(HostError, match="is no journal of this program"):
        undone(root, journal)
    assert (root / "etc/passwd").read_text() == PASSWD and journal.read_text() == line
    assert (root / "etc/default/irqbalance").read_text() == "A=1\n"


def test_a_line_that_an_apply_writes_is_undone(root: Path, tmp_path: Path) -> None:
    (tmp_path / "journal").write_text(
        written("irqbalance-banned-cpus", f"{BANNED}=7", path="/etc/default/irqbalance")
    )
    assert undone(root, tmp_path / "journal") == ["restored"]
    assert (root / "etc/default/irqbalance").read_text() == f"A=1\n{BANNED}=7\n"


@pytest.mark.parametrize("wrong", ["owner", "mode", "link", "fifo", "folder"])
def test_a_journal_that_others_may_have_written_is_not_used(root: Path, tmp_path: Path, wrong: str) -> None:
    journal = tmp_path / "folder/journal"
    journal.parent.mkdir()
    if wrong == "fifo":
        os.mkfifo(journal, 0o600)
    elif wrong == "link":
        journal.symlink_to(root / "etc/passwd")
    else:
        journal.touch(0o600)
        journal.chmod(0o666 if wrong == "mode" else 0o600)
        os.chown(journal if wrong == "owner" else journal.parent, 0 if wrong == "mode" else 64101, 0)
    with pytest.raises(HostError) as refused:
        undone(root, journal)
    assert str(journal.parent) in refused.value.detail and refused.value.fix
    if wrong != "folder":
        with pytest.raises(HostError, match="journal"):
            look(journal, "b")
    assert (root / "etc/passwd").read_text() == PASSWD


def test_a_copy_of_a_host_is_read_within_itself(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "secret").write_text("SECRET")
    (tmp_path / "etc").mkdir()
    for name in ("sys/class/net", "sys/devices/nic", "proc/sys/kernel"):
        (root / name).mkdir(parents=True)
    (root / "sys/devices/nic/mtu").write_text("1500\n")
    (root / "sys/class/net/eth0").symlink_to("../../devices/nic")
    (root / "sys/class/net/eth1").symlink_to("/sys/devices/nic")
    (root / "proc/sys/kernel/osrelease").symlink_to(tmp_path / "secret")
    (root / "proc/version").symlink_to("../../secret")
    os.mkfifo(root / "proc/cmdline")
    (root / "etc/tuned").symlink_to(tmp_path)
    copy = Root(root)
    assert [copy.text(f"/sys/class/net/{name}/mtu") for name in ("eth0", "eth1")] == ["1500", "1500"]
    assert (copy.link("/sys/class/net/eth0"), copy.link("/etc/passwd")) == ("nic", None)
    for path in ("/proc/sys/kernel/osrelease", "/proc/version", "/etc/tuned/secret", "/proc/cmdline"):
        assert isinstance(copy.text(path), Unknown), path
    read_facts(copy)
    assert main(["host", "facts", "--root", str(root), "-f", "json"]) == 0
    assert "SECRET" not in capsys.readouterr().out
    writable = WritableRoot(root)
    (root / "etc/link").symlink_to("default/irqbalance")
    writable.replace("/etc/link", "B=2\n")
    writable.replace("/etc/new", "C=3\n")
    with pytest.raises(OSError):
        writable.replace("/etc/tuned/new", "D=4\n")
    assert (root / "etc/default/irqbalance").read_text() == "B=2\n" and (root / "etc/link").is_symlink()
    assert (root / "etc/new").read_text() == "C=3\n" and sorted(p.name for p in tmp_path.iterdir()) == [
        *("etc", "root", "secret")
    ]

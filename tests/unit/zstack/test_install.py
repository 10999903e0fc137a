"""The installer under Python 2.7 and 3: into a folder of kvmagent, back after an upgrade, and out of it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.unit.zstack.conftest import PLUGINS

NAME = "netplugin_zstack.py"
UNITS = ("netplugin-zstack.path", "netplugin-zstack.service", "zstack-kvmagent.service.d/netplugin.conf")


@dataclass(frozen=True)
class Kvm:
    """A folder of kvmagent, and a systemctl that writes down what it is told."""

    python: Path
    base: Path

    @property
    def plugins(self) -> Path:
        return self.base / "site-packages/kvmagent/plugins"

    @property
    def calls(self) -> list[str]:
        path = self.base / "told"
        return path.read_text().splitlines() if path.exists() else []

    def run(
        self, *words: str, script: Path = PLUGINS / "install.py", status: int = 0, umask: int = 0o022
    ) -> str:
        done = subprocess.run(
            [
                *[str(self.python), "-B", str(script), *words, "--root", str(self.plugins.parent)],
                *["--library", str(self.base / "library"), "--units", str(self.base / "units")],
            ],
            env={"PATH": f"{self.base / 'bin'}:/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=60,
            umask=umask,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr


@pytest.fixture(params=["2.7", "3"])
def kvm(request: pytest.FixtureRequest, tmp_path: Path) -> Kvm:
    python = request.getfixturevalue("python_27") if request.param == "2.7" else Path(sys.executable)
    kvm = Kvm(python, tmp_path)
    kvm.plugins.mkdir(parents=True)
    systemctl = tmp_path / "bin/systemctl"
    systemctl.parent.mkdir()
    systemctl.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/told\n')
    systemctl.chmod(0o755)
    return kvm


def test_install_status_and_remove(kvm: Kvm) -> None:
    assert "missing" in kvm.run("--status", status=1)
    for _ in range(2):
        printed = kvm.run("--install")
        assert (
            f"replaces getOvsCtl and OvsDpdkCtl of {kvm.base}/site-packages/zstacklib/utils/ovs.py" in printed
        )
    assert (kvm.plugins / NAME).read_bytes() == (PLUGINS / NAME).read_bytes()
    assert [path.name for path in kvm.plugins.iterdir()] == [NAME], "kvmagent loads what is in there"
    assert kvm.calls[-2:] == ["daemon-reload", "enable --now netplugin-zstack.path"]
    assert "installed" in kvm.run("--status")
    (kvm.plugins / f"{NAME}c").touch()
    assert "no longer replaces" in kvm.run("--remove")
    assert list(kvm.plugins.iterdir()) == [] and not (kvm.base / "library").exists()
    assert list((kvm.base / "units").iterdir()) == []
    assert kvm.calls[-2:] == ["disable --now netplugin-zstack.path", "daemon-reload"]
    kvm.run("--remove")


def test_a_file_that_was_there_is_put_back(kvm: Kvm) -> None:
    (kvm.plugins / NAME).write_text("theirs")
    assert "set aside" in kvm.run("--install")
    assert "set aside" not in kvm.run("--install")
    assert "put back" in kvm.run("--remove")
    assert (kvm.plugins / NAME).read_text() == "theirs"
    assert "not the installed version" in kvm.run("--remove")
    assert (kvm.plugins / NAME).read_text() == "theirs"


def test_a_file_that_an_upgrade_of_kvmagent_brings_is_put_back(kvm: Kvm) -> None:
    kvm.run("--install")
    (kvm.plugins / NAME).write_text("theirs")
    assert "set aside" in kvm.run("--restore", script=kvm.base / "library/install.py")
    assert (kvm.plugins / NAME).read_bytes() == (PLUGINS / NAME).read_bytes()
    assert "put back" in kvm.run("--remove")
    assert (kvm.plugins / NAME).read_text() == "theirs"


def test_a_file_that_replaced_ours_is_kept(kvm: Kvm) -> None:
    kvm.run("--install")
    (kvm.plugins / NAME).write_text("theirs")
    kvm.run("--remove")
    assert (kvm.plugins / NAME).read_text() == "theirs" and not (kvm.base / "library").exists()


@pytest.mark.parametrize("mask", [0, 0o077])
def test_only_root_writes_what_root_executes(kvm: Kvm, mask: int) -> None:
    (kvm.base / "library").mkdir()
    (kvm.base / "library").chmod(0o777)
    kvm.run("--install", umask=mask)
    made = [kvm.plugins / NAME, *(kvm.base / "library").iterdir(), *(kvm.base / "units").rglob("*")]
    modes = {(path.is_dir(), path.stat().st_mode & 0o777) for path in [*made, kvm.base / "library"]}
    assert modes == {(False, 0o644), (True, 0o755)}


def test_a_path_that_a_unit_would_read_otherwise_is_refused(kvm: Kvm) -> None:
    bad = Kvm(kvm.python, kvm.base / "a b%n")
    bad.plugins.mkdir(parents=True)
    assert "would need quoted" in bad.run("--install", status=2)
    assert list(bad.plugins.iterdir()) == []


def test_an_upgrade_of_kvmagent(kvm: Kvm) -> None:
    kvm.run("--install")
    copy = kvm.base / "library/install.py"
    (kvm.plugins / NAME).unlink()
    assert "missing" in kvm.run("--status", status=1)
    kvm.run("--restore", script=copy)
    assert (kvm.plugins / NAME).exists() and "try-restart zstack-kvmagent.service" not in kvm.calls
    (kvm.plugins / NAME).unlink()
    kvm.run("--restore", "--restart", "--watch", "0.1", script=copy)
    assert kvm.calls[-1] == "try-restart zstack-kvmagent.service"
    calls = len(kvm.calls)
    kvm.plugins.joinpath(NAME).unlink()
    kvm.plugins.rmdir()
    kvm.run("--restore", script=copy)
    assert len(kvm.calls) == calls, "kvmagent is not there for a while"


def test_an_upgrade_of_the_plugin(kvm: Kvm) -> None:
    kvm.run("--install")
    for path in (kvm.plugins / NAME, kvm.base / "library" / NAME):
        path.write_text("an older version")
    kvm.run("--install")
    assert (kvm.plugins / NAME).read_bytes() == (PLUGINS / NAME).read_bytes()
    assert not (kvm.base / "library" / f"{NAME}.replaced").exists(), "it was ours"


def test_a_folder_that_is_not_kvmagent(kvm: Kvm) -> None:
    kvm.plugins.rmdir()
    assert "has no folder plugins. Fix: --root" in kvm.run("--install", status=2)
    assert not (kvm.base / "library").exists()


def test_systemd_understands_the_units(kvm: Kvm) -> None:
    kvm.run("--install")
    for name in UNITS[:2]:
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", kvm.base / "units" / name],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert name not in done.stderr, done.stderr
    for name in UNITS:
        text = (kvm.base / "units" / name).read_text()
        assert str(kvm.plugins.parent) in text

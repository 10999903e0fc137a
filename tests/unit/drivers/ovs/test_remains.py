"""What a QEMU leaves in its directory is moved aside at once, and removed whatever it is."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from drivers.ovs import remains
from drivers.ovs.remains import ASIDE, REMOVER, Remover, set_aside
from drivers.ovs.socket_directories import RemoveSocketDirectory
from netplugin.api.errors import HostError
from tests.lab.processes import wait_for

OTHER = 64101


def nested(folder: Path) -> None:
    """Deeper than Python recurses, and than a path may be long."""
    at = os.open(folder, os.O_RDONLY)
    for _ in range(1200):
        os.mkdir("directory", dir_fd=at)
        below = os.open("directory", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)


def many(folder: Path) -> None:
    for number in range(1200):
        (folder / str(number)).touch()


def of_all_kinds(folder: Path) -> None:
    (folder / "link").symlink_to(folder.parent.parent)
    (folder / "empty").mkdir(mode=0)
    os.mkfifo(folder / "fifo")
    os.link(folder.parent.parent / "precious", folder / "name")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(folder / "socket"))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "vhost").mkdir()
    (tmp_path / "precious").write_text("kept")
    return tmp_path / "vhost"


@pytest.mark.parametrize("fill", [nested, many, of_all_kinds])
def test_all_is_removed_and_the_place_is_free_at_once(base: Path, fill: Callable[[Path], None]) -> None:
    (base / "port").mkdir()
    fill(base / "port")
    RemoveSocketDirectory(("p",), str(base / "port")).apply()
    (base / "port").mkdir()
    wait_for(lambda: not any((base / ASIDE).iterdir()), 60, "all is removed")
    assert (base / ASIDE).stat().st_mode & 0o7777 == 0o700 and REMOVER.stuck == {}
    assert (base.parent / "precious").read_text() == "kept" and (base / "port").is_dir()


def test_whatever_is_in_the_place_of_a_directory_is_removed(base: Path) -> None:
    (base / "npv1").mkdir()
    (base / "npv2").symlink_to(base.parent)
    for name in ("npv1", "npv2", "npv3"):
        RemoveSocketDirectory(("p",), str(base / name)).apply()
    assert [path.name for path in base.iterdir()] == [ASIDE]
    wait_for(lambda: not any((base / ASIDE).iterdir()), 60, "all is removed")


def test_nothing_is_moved_to_a_directory_of_others(base: Path) -> None:
    (base / "port").mkdir()
    (base / ASIDE).mkdir()
    os.chown(base / ASIDE, OTHER, OTHER)
    with pytest.raises(HostError, match=f"belongs to user {OTHER}"):
        set_aside(str(base / "port"))
    (base / ASIDE).rmdir()
    (base / ASIDE).symlink_to(base.parent)
    with pytest.raises(HostError):
        set_aside(str(base / "port"))
    assert (base / "port").is_dir() and len(list(base.parent.iterdir())) == 2


def test_what_was_not_removed_is_removed_after_a_restart(base: Path) -> None:
    (base / ASIDE / "left/over").mkdir(parents=True)
    REMOVER.start(base)
    wait_for(lambda: not any((base / ASIDE).iterdir()), 60, "all is removed")


def test_what_could_not_be_removed_is_tried_again_until_it_is(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remains, "_AGAIN_S", (0.01, 0.01))
    remover, chmod, fails = Remover(), os.fchmod, threading.Event()
    fails.set()

    def refused(*args: int) -> None:
        if fails.is_set():
            raise OSError(errno.EIO, "the disk is broken")
        chmod(*args)

    monkeypatch.setattr(os, "fchmod", refused)
    (base / ASIDE / "left/over").mkdir(parents=True)
    remover.start(base)
    wait_for(lambda: remover.stuck, 60, "it is told")
    assert remover.stuck == {str(base / ASIDE / "left"): "the disk is broken"}
    fails.clear()
    wait_for(lambda: not any((base / ASIDE).iterdir()), 60, "all is removed")
    wait_for(lambda: not remover.stuck, 60, "nothing is left")

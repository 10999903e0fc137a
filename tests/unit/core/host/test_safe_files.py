"""Files of ours are opened as such, and a tree of others is not left, while others change both."""

from __future__ import annotations

import os
import signal
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from netplugin.host.safe_files import (
    UnsafeFile,
    folder_within,
    make_directory,
    open_file_within,
    open_own,
    opened,
    read_own,
    replacing,
    require_own_directory,
)

OTHER = 64101
SECRET = "of this host\n"


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    """What is made has its mode whatever this is."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "secret").chmod(0o600)
    return tmp_path / "secret"


def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def of_another(path: Path) -> None:
    path.touch(0o600)
    os.chown(path, OTHER, OTHER)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: path.symlink_to(path.with_name("secret")), "is a symbolic link"),
        (os.mkfifo, "is a FIFO and no regular file"),
        (Path.mkdir, "is a directory and no regular file"),
        (bind, "is a socket and no regular file"),
        (of_another, f"belongs to user {OTHER}"),
        (lambda path: path.touch(0o660), "can be written by others (mode 660). Fix: chmod 640"),
        (lambda path: os.link(path.with_name("secret"), path), "has 2 names"),
    ],
)
@pytest.mark.parametrize("flags", [os.O_RDWR | os.O_CREAT, os.O_WRONLY | os.O_CREAT | os.O_APPEND])
def test_what_is_not_ours_is_not_opened_and_nobody_waits(
    secret: Path, make: Callable[[Path], object], reason: str, flags: int
) -> None:
    path = secret.with_name("file")
    make(path)
    with pytest.raises(UnsafeFile) as refused:
        open_own(path, flags)
    assert f"{path} {reason}" in str(refused.value) and secret.read_text() == SECRET


def test_a_file_that_the_operator_names_may_be_a_link_to_one_of_ours(secret: Path) -> None:
    link = secret.with_name("link")
    link.symlink_to(secret)
    assert read_own(link, deny=0o077) == SECRET.encode()
    os.chown(secret, OTHER, OTHER)
    with pytest.raises(UnsafeFile, match=f"belongs to user {OTHER}"):
        read_own(link)


def test_directories_have_their_modes_and_owners(tmp_path: Path) -> None:
    made = tmp_path / "a/b"
    make_directory(made, 0o711)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (made.parent, made)] == [0o755, 0o711]
    require_own_directory(made)
    made.chmod(0o1777)
    require_own_directory(made)
    made.chmod(0o777)
    with pytest.raises(UnsafeFile, match="can be written by others"):
        require_own_directory(made)
    os.chown(made, OTHER, -1)
    with pytest.raises(UnsafeFile, match=f"belongs to user {OTHER}"):
        require_own_directory(made)


def test_a_file_is_replaced_whole_or_not_at_all(secret: Path) -> None:
    with pytest.raises(ValueError, match="no"), replacing(secret, 0o644) as file:
        file.write(b"half")
        raise ValueError("no")
    assert secret.read_text() == SECRET and list(secret.parent.iterdir()) == [secret]
    link = secret.with_name("link")
    link.symlink_to(secret)
    with replacing(link, 0o640, (0, OTHER)) as file:
        file.write(b"new")
    found = link.lstat()
    assert (stat.S_IMODE(found.st_mode), found.st_gid, link.read_text()) == (0o100640 & 0o7777, OTHER, "new")
    assert secret.read_text() == SECRET


def test_a_tree_is_not_left(secret: Path) -> None:
    tree = secret.with_name("tree")
    (tree / "etc").mkdir(parents=True)
    (tree / "etc/name").write_text("inside")
    (tree / "etc/absolute").symlink_to("/etc/name")
    (tree / "etc/out").symlink_to("../../secret")
    (tree / "out").symlink_to(secret.parent)
    (tree / "magic").symlink_to("/proc/self/root")
    os.mkfifo(tree / "fifo")
    with open_file_within(tree, "/etc/absolute") as file:
        assert file.read() == b"inside"
    for name in ("/etc/out", "/out/secret", "../secret", "/etc/../../secret", f"/magic{secret}"):
        with pytest.raises(FileNotFoundError):
            open_file_within(tree, name)
    for name in ("fifo", "etc"):
        with pytest.raises(UnsafeFile, match="no regular file"):
            open_file_within(tree, name)
    for name in ("out", "out/new", "etc/name/new", "../new"):
        with pytest.raises(NotADirectoryError):
            folder_within(tree, name)
    with opened(folder_within(tree, "/etc/new/er")):
        assert stat.S_IMODE((tree / "etc/new").stat().st_mode) == 0o755
    assert sorted(path.name for path in secret.parent.iterdir()) == ["secret", "tree"]


@contextmanager
def swapped_by_another(folder: Path, secret: Path) -> Iterator[None]:
    """Another user makes ``name`` in its folder a file and a link to the secret in turn."""
    os.chown(folder, OTHER, OTHER)
    child = os.fork()
    if not child:
        os.chdir(folder)  # others may not pass the directories above it
        os.setgroups([])
        os.setgid(OTHER)
        os.setuid(OTHER)
        Path("file").touch()
        while True:
            with suppress(OSError):
                os.symlink(secret, "fresh")
                os.rename("fresh", "name")
                os.link("file", "fresh")
                os.rename("fresh", "name")
                os.unlink("fresh")
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_another_who_swaps_a_link_and_a_file_gets_nothing(secret: Path) -> None:
    folder = secret.with_name("folder")
    folder.mkdir()
    with swapped_by_another(folder, secret):
        for _ in range(1000):
            with suppress(OSError), open_file_within(folder, "name") as file:
                assert file.read() == b""
            with suppress(UnsafeFile, FileNotFoundError):
                pytest.fail(f"opened for writing: {open_own(folder / 'name', os.O_RDWR)}")
        for _ in range(10):
            with replacing(folder / "name", 0o644) as file:
                file.write(b"new")
    assert secret.read_text() == SECRET and stat.S_IMODE(secret.stat().st_mode) == 0o600


def test_a_tree_with_ways_up_is_read_while_others_rename(secret: Path) -> None:
    folder, tree = secret.with_name("folder"), secret.with_name("tree")
    folder.mkdir()
    (tree / "bus").mkdir(parents=True)
    (tree / "devices").mkdir()
    (tree / "devices/class").write_text("inside")
    (tree / "bus/device").symlink_to("../devices")
    with swapped_by_another(folder, secret):
        for _ in range(5000):
            with open_file_within(tree, "bus/device/class") as file:
                assert file.read() == b"inside"

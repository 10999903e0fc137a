"""The root file system of an image: files written, traces of the build removed, times bounded, digested."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType

from netplugin.host.processes import run
from netplugin.host.safe_files import folder_within, open_file_within, opened
from netplugin.libvirt.vm_image import sha256
from netplugin_zeroloss.values import UnusableInput
from netplugin_zeroloss.vm.contents import MODES, Contents, Texts

#: Traces of the build: caches and logs, and what differs from host to host. A folder loses what is in it.
_TRACES = (
    *("etc/ssh/ssh_host_*", "etc/.pwd.lock", "etc/*-", "root/.bash_history", "zeroloss-packages"),
    *("var/cache/apt/*", "var/cache/debconf/*-old", "var/cache/ldconfig/*", "var/cache/man/*"),
    *("var/lib/apt/lists/*", "var/lib/dbus/machine-id", "var/lib/dpkg/*-old", "var/lib/cloud/*"),
    *("var/lib/systemd/random-seed", "var/log/**/*.log*", "var/log/journal/*", "var/log/*tmp"),
    *("var/log/lastlog", "var/log/faillog", "dev/*", "run/*", "tmp/*", "var/tmp/*"),
)
#: Deadline of removing a folder, in seconds.
_REMOVED_S = 600.0
#: The folder of the keys that may log in.
_KEYS = Path("root/.ssh")
#: Folders that the kernel and systemd mount on, with their modes.
_DIRECTORIES = {"proc": 0o555, "sys": 0o555, "dev": 0o755, "run": 0o755, "tmp": 0o1777}


@contextmanager
def folder(tree: Path, name: str) -> Iterator[int]:
    """Open a folder of the tree, made if there is none. Raises: UnusableInput if a link leads to it."""
    try:
        descriptor = folder_within(tree, name)
    except NotADirectoryError as wrong:
        why = f"{wrong.filename!r} in it is a link, which could lead to this host, or a file"
        raise UnusableInput(str(tree), f"/{name} is no folder: {why}") from None
    with opened(descriptor):
        yield descriptor


def write(tree: Path, files: Texts, links: Texts = MappingProxyType({})) -> None:
    """Write the files and links, in place of those of the same name. Raises: UnusableInput."""
    for path in (*files, *links):
        name = os.path.basename(path)
        with folder(tree, os.path.dirname(path)) as above:
            try:
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=above)
            except IsADirectoryError:
                raise UnusableInput(str(tree), f"/{path} is a folder") from None
            if path in links:
                os.symlink(links[path], name, dir_fd=above)
                continue
            descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, dir_fd=above)
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(files[path])
                os.fchmod(descriptor, MODES.get(path, 0o644))
            if Path(path).parent == _KEYS:
                os.fchmod(above, 0o700)  # else sshd does not read them


def clean(tree: Path) -> None:
    """Remove the traces of the build. Links to folders are not followed: they could lead to this host."""
    inside = tree.resolve()
    for pattern in _TRACES:
        for path in sorted(tree.glob(pattern), reverse=True):
            if path.parent.resolve().is_relative_to(inside):
                remove(path)
    for name, mode in _DIRECTORIES.items():
        if not (tree / name).is_symlink():
            with folder(tree, name) as descriptor:
                os.fchmod(descriptor, mode)


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it, however deep. Raises: NetpluginError."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    command = ["rm", "--recursive", "--force", "--one-file-system", "--", str(path)]
    run(command, step="vm-tree", deadline=time.monotonic() + _REMOVED_S)


def finish(tree: Path, made: Contents, seconds: int) -> None:
    """Clean the tree, write the contents of the image, and let no file be newer than ``seconds``."""
    clean(tree)
    write(tree, made.files, made.links)
    for path in _walk(tree):
        if path.lstat().st_mtime > seconds:
            os.utime(path, (seconds, seconds), follow_symlinks=False)
    os.utime(tree, (seconds, seconds))


def digest(tree: Path) -> str:
    """Return the SHA-256 over name, mode, owner, time and content of each file."""
    found = hashlib.sha256()
    for path in _walk(tree):
        about = path.lstat()
        content = ""
        if stat.S_ISREG(about.st_mode):
            content = sha256(path)
        elif stat.S_ISLNK(about.st_mode):
            content = os.readlink(path)
        numbers = (f"{about.st_mode:o}", about.st_uid, about.st_gid, int(about.st_mtime))
        line = (*numbers, content, str(path.relative_to(tree)))
        found.update(b"\0".join(str(word).encode(errors="surrogateescape") for word in line) + b"\n")
    return found.hexdigest()


def _walk(tree: Path) -> Iterator[Path]:
    """Yield all that is in the tree, however deep, always in the same order."""
    left = sorted(tree.iterdir(), reverse=True)
    while left:
        yield (path := left.pop())
        if path.is_dir() and not path.is_symlink():
            left += sorted(path.iterdir(), reverse=True)


def packages(tree: Path) -> Mapping[str, Mapping[str, str]]:
    """Return the fields of each installed package, by its name; none in a tree without dpkg."""
    try:
        with open_file_within(tree, "var/lib/dpkg/status") as file:
            text = file.read().decode(errors="replace")
    except OSError:
        return {}
    found = {}
    for block in text.split("\n\n"):
        fields = dict(re.findall(r"^([A-Za-z-]+): (.*)$", block, re.MULTILINE))
        if fields.get("Status", "").endswith(" installed"):
            found[fields["Package"]] = fields
    return found


def kernel(tree: Path, metapackage: str) -> tuple[str, str]:
    """Return kernel and initial RAM disk, as paths in the tree: those of the package, else the only ones.

    Raises: UnusableInput if there is none, or several.
    """
    depends = packages(tree).get(metapackage.partition("=")[0], {}).get("Depends", "")
    version = re.search(r"linux-image-(\S+)", depends)
    if version:
        names = [version[1]]
    else:
        with folder(tree, "boot") as boot:
            names = sorted(n.removeprefix("vmlinuz-") for n in os.listdir(boot) if n.startswith("vmlinuz-"))
    if len(names) != 1:
        there = ", ".join(names) or "none"
        raise UnusableInput(
            "--kernel", f"the image needs one kernel, and has {there}: name its package, or install it"
        )
    pair = f"boot/vmlinuz-{names[0]}", f"boot/initrd.img-{names[0]}"
    for path in pair:
        try:
            open_file_within(tree, path).close()
        except OSError as wrong:
            raise UnusableInput("--kernel", f"the image has no /{path}: {wrong.strerror}") from None
    return pair


def copy_out(tree: Path, name: str, target: Path) -> None:
    """Copy a regular file of the tree, which a link in it may lead to."""
    with open_file_within(tree, name) as source, target.open("xb") as copy:
        shutil.copyfileobj(source, copy)

"""The root file system of an image: files written, traces of the build removed, times bounded, digested."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from netplugin.libvirt.vm_image import sha256
from netplugin_zeroloss.values import UnusableInput
from netplugin_zeroloss.vm.contents import Content, Contents

#: Traces of the build: caches and logs, and what differs from host to host. A folder loses what is in it.
_TRACES = (
    "etc/ssh/ssh_host_*",
    "etc/.pwd.lock",
    "etc/*-",
    "var/cache/apt/*",
    "var/cache/debconf/*-old",
    "var/cache/ldconfig/*",
    "var/cache/man/*",
    "var/lib/apt/lists/*",
    "var/lib/dbus/machine-id",
    "var/lib/dpkg/*-old",
    "var/lib/systemd/random-seed",
    "var/lib/cloud/*",
    "var/log/**/*.log*",
    "var/log/journal/*",
    "var/log/*tmp",
    "var/log/lastlog",
    "var/log/faillog",
    "root/.bash_history",
    "dev/*",
    "run/*",
    "tmp/*",
    "var/tmp/*",
    "zeroloss-packages",
)
#: Folders that the kernel and systemd mount on, with their modes.
_DIRECTORIES = {"proc": 0o555, "sys": 0o555, "dev": 0o755, "run": 0o755, "tmp": 0o1777}


def write(tree: Path, files: tuple[Content, ...], links: tuple[tuple[str, str], ...] = ()) -> None:
    """Write the files and links, in place of those of the same name."""
    for each in files:
        path = _made_way(tree, each.path)
        path.write_text(each.text, encoding="utf-8")
        path.chmod(each.mode)
    for name, target in links:
        _made_way(tree, name).symlink_to(target)
    if (keys := tree / "root/.ssh").is_dir():
        keys.chmod(0o700)  # else sshd does not read them


def clean(tree: Path) -> None:
    """Remove the traces of the build. Links to folders are not followed: they could lead to this host."""
    inside = tree.resolve()
    for pattern in _TRACES:
        for path in sorted(tree.glob(pattern), reverse=True):
            if not path.parent.resolve().is_relative_to(inside):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    for name, mode in _DIRECTORIES.items():
        path = tree / name
        if not path.is_symlink():
            path.mkdir(exist_ok=True)
            path.chmod(mode)


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
    """Yield all that is in the tree, always in the same order."""
    for path in sorted(tree.iterdir()):
        yield path
        if path.is_dir() and not path.is_symlink():
            yield from _walk(path)


def _made_way(tree: Path, name: str) -> Path:
    """Return the path of a file in the tree, which is not there, and whose folders are.

    Raises: UnusableInput if a folder of it is a link, which could lead out of the tree.
    """
    path = tree / name
    folder = tree
    for part in Path(name).parts[:-1]:
        folder /= part
        if folder.is_symlink():
            raise UnusableInput(str(tree), f"/{folder.relative_to(tree)} is a link, and {name} goes below it")
        if not folder.is_dir():
            folder.mkdir()
            folder.chmod(0o755)  # whatever the umask
    if path.is_dir() and not path.is_symlink():
        raise UnusableInput(str(tree), f"/{name} is a folder")
    path.unlink(missing_ok=True)
    return path


def packages(tree: Path) -> Mapping[str, Mapping[str, str]]:
    """Return the fields of each installed package, by its name; none in a tree without dpkg."""
    try:
        text = (tree / "var/lib/dpkg/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    found = {}
    for block in text.split("\n\n"):
        fields = dict(re.findall(r"^([A-Za-z-]+): (.*)$", block, re.MULTILINE))
        if fields.get("Status", "").endswith(" installed"):
            found[fields["Package"]] = fields
    return found


def kernel(tree: Path, metapackage: str) -> tuple[Path, Path]:
    """Return kernel and initial RAM disk: those of the package, else the only ones.

    Raises: UnusableInput if there is none, or several.
    """
    depends = packages(tree).get(metapackage.partition("=")[0], {}).get("Depends", "")
    version = re.search(r"linux-image-(\S+)", depends)
    names = [version[1]] if version else [p.name.removeprefix("vmlinuz-") for p in _kernels(tree)]
    if len(names) != 1:
        there = ", ".join(names) or "none"
        raise UnusableInput(
            "--kernel", f"the image needs one kernel, and has {there}: name its package, or install it"
        )
    pair = tree / f"boot/vmlinuz-{names[0]}", tree / f"boot/initrd.img-{names[0]}"
    for path in pair:
        if not path.is_file():
            raise UnusableInput("--kernel", f"the image has no /{path.relative_to(tree)}")
    return pair


def _kernels(tree: Path) -> list[Path]:
    return sorted(tree.glob("boot/vmlinuz-*"))

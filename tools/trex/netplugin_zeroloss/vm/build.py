"""Build an image of the VM, or return the cached one of the same inputs."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from netplugin.api.errors import reason
from netplugin.host.processes import run
from netplugin.host.safe_files import UnsafeFile, opened, own_directory, sync
from netplugin.libvirt import vm_image
from netplugin.libvirt.vm_image import DISK, INITRD, KERNEL, KEY, KNOWN_HOSTS, MEASURED, Image, Manifest
from netplugin_zeroloss.values import UnusableInput
from netplugin_zeroloss.vm import commands, image, tree
from netplugin_zeroloss.vm.commands import contained
from netplugin_zeroloss.vm.contents import VPP, VPP_LIBRARIES, Contents, Identity, contents_of, key_of
from netplugin_zeroloss.vm.image import LATEST
from netplugin_zeroloss.vm.spec import LAYOUT, VmSpec

#: Deadline of one command of a build, in seconds.
_COMMAND_S = 3600.0
#: Deadline of making a key, in seconds.
_KEY_S = 60.0
#: Interval of the lines about a command that still runs, in seconds.
_ALIVE_S = 10.0
#: Seconds until a command that is ended has ended.
_END_S = 10.0
_UNFINISHED = "building-"
_HOST_KEY = "host_key"
_LAST_LINES = 15
#: Characters of the key in the name of an image's folder.
_NAME = 16


class Builder:
    """Builds images in a folder, one at a time. ``login``: the key for SSH; None: one is made."""

    def __init__(self, folder: Path, login: Path | None, say: Callable[[str], None]) -> None:
        self._folder = Path(os.path.abspath(folder))
        self._login = Path(os.path.abspath(login or self._folder / KEY))
        self._made = (_HOST_KEY,) if login else (_HOST_KEY, KEY)
        self._say = say

    def build(self, spec: VmSpec, again: bool = False) -> Image:
        """Return the image of these inputs, built if it is not cached or if ``again`` asks for it.

        Raises: UnusableInput with what failed, NetpluginError if the guest cannot be tuned so or a key
        cannot be made; KeyboardInterrupt. Then there is no more than before.
        """
        _check(spec)
        try:
            own_directory(self._folder, 0o755)
            with opened(os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)) as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    self._say(f"another build runs in {self._folder}: waiting for it")
                    fcntl.flock(lock, fcntl.LOCK_EX)
                return self._locked(spec, again)
        except UnsafeFile as error:
            raise UnusableInput(str(self._folder), str(error)) from error
        except OSError as error:
            raise UnusableInput(str(self._folder), f"{error.strerror}: {error.filename}") from error

    def _locked(self, spec: VmSpec, again: bool) -> Image:
        for left in self._folder.glob(f"{_UNFINISHED}*"):  # by a build that was killed
            tree.remove(left)
        made = contents_of(spec, self._identity())
        for note in made.notes:
            self._say(f"note: {note}")
        key = key_of(spec, made)
        target = self._folder / key[:_NAME]
        there = None
        with suppress(UnusableInput):
            there = image.read(target).manifest.key
        if there == key and not again:
            self._say(f"{target} has these inputs already")
        else:
            work = Path(tempfile.mkdtemp(dir=self._folder, prefix=_UNFINISHED))
            work.chmod(0o755)  # apt's user downloads below it
            try:
                self._make(spec, made, key, work)
                if target.exists():
                    target.rename(work / "before")
                (work / "image").rename(target)
            finally:
                tree.remove(work)
        # At no time does the link lead to none.
        link = self._folder / f"{_UNFINISHED}{LATEST}"
        link.symlink_to(target.name)
        link.rename(self._folder / LATEST)
        return image.read(target)

    def _make(self, spec: VmSpec, made: Contents, key: str, work: Path) -> None:
        root, done, early = (_folder(work / name) for name in ("root", "image", "early"))
        disk = work / "disk.raw"
        tree.write(early, made.early)
        if spec.base is None:
            packages = f"{len(made.packages)} packages and their needs"
            self._say(f"1/5 Debian {spec.suite} by mmdebstrap, with {packages}")
            sources = []
            if text := spec.apt_sources():
                sources = [work / ("apt.sources" if "\nURIs:" in f"\n{text}" else "apt.list")]
                sources[0].write_text(text, encoding="utf-8")
            self._run(commands.mmdebstrap(spec, made.packages, early, sources, root), work, spec.time)
        else:
            self._say(f"1/5 the root file system of {spec.base}")
            self._of_base(spec.base, work, root)
            tree.write(root, made.early)
        self._install(spec, made, root)
        self._say("3/5 settings, keys and the tuning of `netplugin guest plan`")
        tree.finish(root, made, spec.time)
        for path, name in zip(tree.kernel(root, spec.kernel), (KERNEL, INITRD), strict=True):
            tree.copy_out(root, path, done / name)
        self._say(f"4/5 disk of {spec.disk_mb} MB")
        self._run(commands.file_system(root, disk, key, spec.disk_mb), work, spec.time)
        self._run(contained("qemu-img", "convert", "-f", "raw", "-O", "qcow2", disk, done / DISK), work)
        self._say("5/5 digests")
        self._manifest(spec, made, key, root, done)

    def _of_base(self, base: Path, work: Path, root: Path) -> None:
        if tarfile.is_tarfile(base):
            kept = ("--numeric-owner", "--xattrs", "--xattrs-include=*", "--acls")
            self._run(contained("tar", "--extract", *kept, "--file", base, "--directory", root), work)
            return
        raw, mount_point = work / "base.raw", _folder(work / "base")
        disk_format = commands.format_of(_printed("qemu-img", "info", "--output=json", base))
        if disk_format is None:
            raise UnusableInput("--base", f"{base} is no raw or qcow2 disk that needs no other file")
        self._run(contained("qemu-img", "convert", "-f", disk_format, "-O", "raw", base, raw), work)
        table = _printed("partx", "--raw", "--noheadings", "--output", "START,SECTORS,TYPE", raw)
        offset, size = commands.root_partition(table, raw.stat().st_size)
        copied = commands.script(commands.COPY, "mount", str(offset), str(size), raw, mount_point, root)
        self._run(copied, work)
        raw.unlink()

    def _install(self, spec: VmSpec, made: Contents, root: Path) -> None:
        """Install packages in the base, and VPP."""
        if spec.vpp_tree is not None:
            place = Path(VPP.lstrip("/"))
            with tree.folder(root, str(place.parent)) as above:
                shutil.copytree(spec.vpp_tree, f"/proc/self/fd/{above}/{place.name}", symlinks=True)
        chosen = list(made.packages) if spec.base is not None and spec.install else []
        debs = root / "zeroloss-packages"
        tree.remove(debs)
        for package in spec.vpp_packages:
            debs.mkdir(exist_ok=True)
            shutil.copyfile(package, debs / package.name)
            chosen.append(f"/{debs.name}/{package.name}")
        self._say(f"2/5 {len(chosen) or 'no'} more packages")
        if chosen:
            for name in commands.INSTALLS_IN:
                with tree.folder(root, name):
                    pass  # it is a folder, and no link to one of this host
            self._run(commands.script(commands.INSTALL, "apt-get", root, *chosen), root.parent, spec.time)
        if spec.vpp_tree is not None:
            tree.write(root, VPP_LIBRARIES)
            self._run(contained("ldconfig", "-r", root), root.parent)

    def _manifest(self, spec: VmSpec, made: Contents, key: str, root: Path, done: Path) -> None:
        (done / KEY).symlink_to(self._login)
        # For any name and port: the caller decides which port of the host leads to the VM.
        (done / KNOWN_HOSTS).write_text(f"* {_public(self._folder / _HOST_KEY)}")
        for name in MEASURED:
            (done / name).chmod(0o444)
        manifest = Manifest(
            layout=LAYOUT,
            key=key,
            vcpus=spec.vcpus,
            memory_mb=spec.memory_mb,
            arguments=made.arguments,
            driver=made.driver,
            iommu=made.iommu,
            digests={name: vm_image.sha256(done / name) for name in MEASURED},
            tree=tree.digest(root),
            packages={name: fields["Version"] for name, fields in tree.packages(root).items()},
            epoch=spec.time,
            origin=spec.base.name if spec.base is not None else f"Debian {spec.suite}",
        )
        (done / vm_image.MANIFEST).write_text(vm_image.written(manifest), encoding="utf-8")
        for name in (*MEASURED, vm_image.MANIFEST):
            sync(done / name)

    def _identity(self) -> Identity:
        """Return the keys; those of the folder are made by its first build. Raises: NetpluginError."""
        for key in (self._folder / name for name in self._made):
            if not key.with_name(f"{key.name}.pub").exists():
                key.unlink(missing_ok=True)
                made = self._folder / f"{_UNFINISHED}{key.name}"
                command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(made)]
                run(command, step="vm-keys", deadline=time.monotonic() + _KEY_S)
                made.rename(key)
                # The last of the two: without it, both are made again.
                made.with_name(f"{made.name}.pub").rename(key.with_name(f"{key.name}.pub"))
        host = self._folder / _HOST_KEY
        return Identity(_public(self._login), host.read_text(), _public(host))

    def _run(self, command: Sequence[str], work: Path, seconds: int | None = None) -> None:
        """Run a command, with a line now and then about how far it is.

        Raises: UnusableInput with the end of what it printed.
        """
        log, program = work / "build.log", commands.program(command)
        # E2FSPROGS_FAKE_TIME: for mke2fs before 1.47.1, which ignores SOURCE_DATE_EPOCH.
        names = () if seconds is None else ("SOURCE_DATE_EPOCH", "E2FSPROGS_FAKE_TIME")
        environment = os.environ | dict.fromkeys(names, str(seconds))
        start, took = time.monotonic(), 0.0
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )
        try:
            while process.returncode is None:
                try:
                    process.wait(_ALIVE_S)
                except subprocess.TimeoutExpired:
                    took = time.monotonic() - start
                    self._say(f"    {took:.0f} s:{_tail(log, 1).strip()[:90]}")
                if took > _COMMAND_S:
                    raise UnusableInput(program, f"it took more than {took:.0f} s")
        finally:
            _end(process)
        if process.returncode:
            raise UnusableInput(program, f"it failed:{_tail(log, _LAST_LINES)}")


def _public(key: Path) -> str:
    """Return type and key of the public key, without its comment, which may name a host.

    Raises: UnusableInput.
    """
    file = key.with_name(f"{key.name}.pub")
    try:
        words = file.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        why = f"the public key next to {key} cannot be read: {reason(error)}"
        raise UnusableInput(str(file), why) from error
    if len(words) < 2 or not words[0].startswith(("ssh-", "ecdsa-", "sk-")):
        raise UnusableInput(str(file), "it is no public key of OpenSSH")
    return f"{words[0]} {words[1]}\n"


def _printed(*command: str | Path) -> str:
    """Return what a command prints; nothing if it fails."""
    return subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S, check=False).stdout


def _folder(path: Path) -> Path:
    """Make a folder that all may enter, whatever the umask."""
    path.mkdir()
    path.chmod(0o755)
    return path


def _check(spec: VmSpec) -> None:
    """Raises: UnusableInput for all that is missing on this host."""
    needed = [(name, f"{name} (apt-get install {package})") for name, package in commands.programs(spec)]
    if missing := [what for name, what in needed if shutil.which(name) is None]:
        raise UnusableInput("vm build", f"not installed: {', '.join(missing)}")
    if os.geteuid() != 0:
        why = "it makes a root file system, whose files belong to root: run it as root"
        raise UnusableInput("vm build", why)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command with all its processes, if it still runs.

    ``unshare`` ends when the first process of its namespace has, and that is after all the others.
    """
    if process.poll() is not None:
        return
    first: list[str] = []
    with suppress(OSError):
        first = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    with suppress(ProcessLookupError):
        for child in first:
            os.kill(int(child), signal.SIGKILL)
    try:
        process.wait(_END_S if first else 0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _tail(log: Path, lines: int) -> str:
    text = log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n")
    return "".join(f"\n  {line}" for line in [line for line in text.splitlines() if line.strip()][-lines:])

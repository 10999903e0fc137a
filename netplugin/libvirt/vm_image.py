"""An image of a VM as `zeroloss vm build` makes it: a folder with disk, kernel, keys and a manifest.

A VM writes to an overlay of the disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from netplugin.api.errors import InvalidRequest
from netplugin.api.fields import Value
from netplugin.host.processes import printable, run
from netplugin.host.safe_files import open_file_within

#: Files of an image. The key for SSH is a link to the file that the operator gave, or to that of the folder.
DISK, KERNEL, INITRD, MANIFEST = "disk.qcow2", "vmlinuz", "initrd.img", "manifest.json"
KEY, KNOWN_HOSTS = "key", "known_hosts"
#: Files of which the manifest has a digest.
MEASURED = (DISK, KERNEL, INITRD)
BUILD = "netplugin-zeroloss vm build"
_STEP = "vm-image"

_OVERLAYS = "overlays"
_CALL_S = 60.0
_CONSOLE_LINES = 10
#: Where they are looked for: the guest writes as much as it likes.
_CONSOLE_BYTES = 1 << 16


class Manifest(Value):
    """What an image is made of. It is written last, so a folder without one is no image."""

    #: Version of the layout of the folder.
    layout: int
    #: Hash of the inputs.
    key: str
    vcpus: int
    memory_mb: int
    #: Kernel command line.
    arguments: str
    #: Driver of the NICs under test in the VM.
    driver: str
    #: Whether NICs under test that are not virtio need an emulated IOMMU.
    iommu: bool
    #: SHA-256 of each file in ``MEASURED``.
    digests: Mapping[str, str]
    #: SHA-256 over names, owners, modes, times and contents of all files of the root file system.
    tree: str
    #: Version by package.
    packages: Mapping[str, str]
    #: SOURCE_DATE_EPOCH of the build, seconds.
    epoch: int
    #: Where the root file system is from: a suite of Debian, or the file name of the base.
    origin: str


@dataclass(frozen=True, slots=True)
class Image:
    """``folder`` is absolute and contains no links."""

    folder: Path
    manifest: Manifest

    @property
    def disk(self) -> Path:
        return self.folder / DISK

    def damage(self) -> Iterator[str]:
        """Yield each file that is not as it was built."""
        for name, digest in self.manifest.digests.items():
            try:
                now = sha256(self.folder / name)
            except OSError as error:
                yield f"{self.folder / name}: {error.strerror}"
                continue
            if now != digest:
                yield f"{self.folder / name} has changed since it was built"

    def overlay(self, name: str) -> Path:
        """Return the file to which the VM of this name writes."""
        return self.folder / _OVERLAYS / f"{name}.qcow2"

    def console(self, name: str) -> Path:
        return self.folder / _OVERLAYS / f"{name}.console"

    def console_tail(self, name: str) -> str:
        """Return the last lines of the VM's console, for an error; empty without a console."""
        try:
            with open_file_within(Path("/"), str(self.console(name))) as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _CONSOLE_BYTES))
                text = file.read(_CONSOLE_BYTES).decode(errors="replace")
        except OSError:
            return ""
        lines = [printable(line) for line in text.splitlines() if line.strip()]
        return "".join(f"\n  {line}" for line in ["its console:", *lines[-_CONSOLE_LINES:]]) if lines else ""

    def make_overlay(self, name: str) -> None:
        """Make an empty overlay; QEMU opens the disk behind it for reading only. Raises: NetpluginError."""
        overlay = self.overlay(name)
        self.remove_overlay(name)
        overlay.parent.mkdir(exist_ok=True)
        try:
            words = [
                "qemu-img",
                "create",
                "-q",
                "-f",
                "qcow2",
                "-F",
                "qcow2",
                "-b",
                str(self.disk),
                str(overlay),
            ]
            run(words, step="vm-overlay", deadline=time.monotonic() + _CALL_S)
        except BaseException:
            self.remove_overlay(name)
            raise

    def remove_overlay(self, name: str) -> None:
        for file in (self.overlay(name), self.console(name)):
            file.unlink(missing_ok=True)

    def state(self) -> tuple[int, int]:
        """Return size and time of the last change of the disk's content, which no VM may change."""
        found = self.disk.stat()
        return found.st_size, found.st_mtime_ns


def read(folder: Path) -> Image:
    """Read the image in a folder. Raises: InvalidRequest if there is none."""
    try:
        there = folder.resolve(strict=True)
        text = (there / MANIFEST).read_text(encoding="utf-8")
        return Image(there, Manifest.model_validate_json(text))
    except OSError as error:
        why = f"there is no image of the VM: {error.strerror}"
    except (ValidationError, UnicodeDecodeError):
        why = f"its {MANIFEST} is not that of this version"
    raise InvalidRequest(f"{folder}: {why}", step=_STEP, fix=f"build one: {BUILD}")


def written(manifest: Manifest) -> str:
    return json.dumps(manifest.model_dump(mode="json"), indent=1, sort_keys=True) + "\n"


def sha256(file: Path) -> str:
    """Return the digest of a file's content. Raises: OSError."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()

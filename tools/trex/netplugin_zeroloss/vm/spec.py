"""The inputs of an image of the VM, and the hash of them by which images are cached."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, StringConstraints, model_validator

from netplugin.api.fields import Value, worded
from netplugin.libvirt.vm_image import sha256
from netplugin.tuning.guest.settings import GuestOptions
from netplugin_zeroloss.values import UnusableInput
from netplugin_zeroloss.vm.contents import Contents, Identity, contents

#: Version of the folder's layout and of how an image is made: other versions are built again.
LAYOUT = 1
#: Time of the files of an image without SOURCE_DATE_EPOCH and snapshot, in seconds.
EPOCH = 1_700_000_000
_TIME = "%Y%m%dT%H%M%SZ"  # of a snapshot, as snapshot.debian.org has it in its URLs
_ARCHIVE = "snapshot.debian.org/archive"

Package = Annotated[
    str,
    StringConstraints(
        pattern=worded(
            r"^[a-z0-9][a-z0-9+.-]+(=[A-Za-z0-9.+:~-]+)?$",
            "must be a package of Debian, with a version after = if a certain one is meant",
        ),
        max_length=200,
        strict=True,
    ),
]
_SUITE = worded(r"^[a-z][a-z0-9-]{0,30}$", "must be a release of Debian such as bookworm")
Suite = Annotated[str, StringConstraints(pattern=_SUITE, strict=True)]
_SNAPSHOT = worded(r"^\d{8}T\d{6}Z$", "must be a time such as 20260131T120000Z")


def _seconds(snapshot: str) -> int:
    """The time of a snapshot in seconds since 1970. Raises: ValueError, for a day that there is not."""
    try:
        return int(datetime.strptime(snapshot, _TIME).replace(tzinfo=UTC).timestamp())
    except ValueError:
        raise ValueError(f"snapshot: there is no time {snapshot}") from None


class VmSpec(Value):
    """What to build. Each field is an option of ``vm build``."""

    suite: Suite = "bookworm"
    #: Text of apt's sources (one line each, or deb822); empty: mmdebstrap's.
    sources: str = ""
    snapshot: Annotated[str, StringConstraints(pattern=_SNAPSHOT, strict=True)] | None = None
    #: Disk image (qcow2 or raw) or archive (tar) of a root file system; None: mmdebstrap makes one.
    base: Path | None = None
    #: Whether packages are installed in the base.
    install: bool = True
    kernel: Package = "linux-image-amd64"
    testpmd: bool = True
    packages: tuple[Package, ...] = ()
    #: Folder of .deb files, or of an installed tree of VPP with bin/vpp.
    vpp: Path | None = None
    vcpus: Annotated[int, Field(ge=1, le=1024)] = 8
    memory_mb: Annotated[int, Field(ge=128, le=1 << 24)] = 8192
    disk_mb: Annotated[int, Field(ge=16, le=1 << 20)] = 8192
    guest: GuestOptions = GuestOptions.model_validate({})
    #: SOURCE_DATE_EPOCH, seconds.
    epoch: Annotated[int, Field(ge=0, le=1 << 33)] | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.snapshot and (self.sources or self.base):
            raise ValueError("snapshot: it is of use only without sources and base")
        if self.snapshot:
            _seconds(self.snapshot)
        if not self.install and self.base is None:
            raise ValueError("install: only a base can have all packages already")
        if not self.install and (self.packages or self.vpp_packages):
            raise ValueError("install: packages are given, and none is to be installed")
        return self

    @property
    def time(self) -> int:
        """The time of the image's files, in seconds: that of SOURCE_DATE_EPOCH, or of the snapshot."""
        if self.epoch is not None:
            return self.epoch
        if self.snapshot:
            return _seconds(self.snapshot)
        return EPOCH

    @property
    def vpp_packages(self) -> tuple[Path, ...]:
        """The .deb files of VPP; none if ``vpp`` is a tree."""
        return tuple(sorted(self.vpp.glob("*.deb"))) if self.vpp is not None else ()

    @property
    def vpp_tree(self) -> Path | None:
        """The installed tree of VPP. Raises: UnusableInput if the folder is neither."""
        if self.vpp is None or self.vpp_packages:
            return None
        if not (self.vpp / "bin/vpp").is_file():
            raise UnusableInput("--vpp", f"{self.vpp} has neither .deb files nor bin/vpp")
        return self.vpp

    def apt_sources(self) -> str:
        """Return apt's sources of the root file system.

        Empty: those of mmdebstrap, which are Debian's mirror with updates and security (mmdebstrap(1)).
        """
        if self.sources or not self.snapshot:
            return self.sources
        return "".join(
            f"deb [check-valid-until=no] http://{_ARCHIVE}/{archive}/{self.snapshot} {suite} main\n"
            for archive, suite in (
                ("debian", self.suite),
                ("debian", f"{self.suite}-updates"),
                ("debian-security", f"{self.suite}-security"),
            )
        )


def contents_of(spec: VmSpec, identity: Identity) -> Contents:
    """Return what the image has in addition to its packages. Raises: NetpluginError, UnusableInput."""
    return contents(
        spec.vcpus,
        spec.memory_mb,
        spec.guest,
        identity,
        packages=spec.packages,
        kernel=spec.kernel,
        testpmd=spec.testpmd,
        vpp_tree=spec.vpp_tree is not None,
    )


def key_of(spec: VmSpec, made: Contents) -> str:
    """Return the hash of all inputs: the options, the files that they name, what goes into the image.

    Packages of the mirror are not an input: their versions are known only after a build.

    Raises: UnusableInput if a file cannot be read.
    """
    inputs: dict[str, Any] = {
        "layout": LAYOUT,
        "spec": spec.model_dump(mode="json", exclude={"base", "vpp", "epoch"}),
        "sources": spec.apt_sources() if spec.base is None else "",
        "time": spec.time,
        "base": sha256_of(spec.base) if spec.base else None,
        "vpp": dict(_files(spec.vpp)) if spec.vpp else None,
        "contents": asdict(made),
    }
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def sha256_of(file: Path) -> str:
    """Return the digest of an input. Raises: UnusableInput."""
    try:
        return sha256(file)
    except OSError as error:
        raise UnusableInput(str(file), error.strerror or str(error)) from error


def _files(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield name and digest of each file below a folder; of a link, its target."""
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            yield name, f"-> {path.readlink()}"
        elif path.is_file():
            yield name, f"{path.stat().st_mode & 0o111:o} {sha256_of(path)}"


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that were given, by their names in ``VmSpec`` and ``GuestOptions``."""
    mine = {name: options[name] for name in VmSpec.model_fields if options.get(name) is not None}
    guest = {name: options[name] for name in GuestOptions.model_fields if options.get(name) is not None}
    return mine | {"guest": guest}

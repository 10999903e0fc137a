"""The inputs of an image of the VM."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, StringConstraints, model_validator

from netplugin.api.fields import Value, worded
from netplugin.libvirt.vm_image import sha256
from netplugin.tuning.guest.settings import GuestOptions
from netplugin_zeroloss.values import UnusableInput

#: Version of the folder's layout and of how an image is made: other versions are built again.
LAYOUT = 1
#: Time of the files of an image without SOURCE_DATE_EPOCH and snapshot, in seconds.
EPOCH = 1_700_000_000
_TIME = "%Y%m%dT%H%M%SZ"  # of a snapshot, as snapshot.debian.org has it in its URLs
_ARCHIVE = "snapshot.debian.org/archive"

_PACKAGE = worded(
    r"^[a-z0-9][a-z0-9+.-]+(=[A-Za-z0-9.+:~-]+)?$",
    "must be a package of Debian, with a version after = if a certain one is meant",
)
_SUITE = worded(r"^[a-z][a-z0-9-]{0,30}$", "must be a release of Debian such as bookworm")
_SNAPSHOT = worded(r"^\d{8}T\d{6}Z$", "must be a time such as 20260131T120000Z")
Package = Annotated[str, StringConstraints(pattern=_PACKAGE, max_length=200, strict=True)]


def _seconds(snapshot: str) -> int:
    """The time of a snapshot in seconds since 1970. Raises: ValueError, for a day that there is not."""
    try:
        return int(datetime.strptime(snapshot, _TIME).replace(tzinfo=UTC).timestamp())
    except ValueError:
        raise ValueError(f"snapshot: there is no time {snapshot}") from None


class VmSpec(Value):
    """What to build. Each field is an option of ``vm build``."""

    suite: Annotated[str, StringConstraints(pattern=_SUITE, strict=True)] = "bookworm"
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
        made = _seconds(self.snapshot) if self.snapshot else EPOCH
        return made if self.epoch is None else self.epoch

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


def digests(place: Path) -> Iterator[tuple[str, str]]:
    """Yield name and digest of a file, or of each file below a folder; of a link, its target.

    Raises: UnusableInput if one cannot be read.
    """
    for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
        name = str(path.relative_to(place))
        if path.is_symlink() and path != place:
            yield name, f"-> {path.readlink()}"
        elif not path.is_dir():
            try:
                yield name, f"{path.stat().st_mode & 0o111:o} {sha256(path)}"
            except OSError as error:
                raise UnusableInput(str(path), error.strerror or str(error)) from error

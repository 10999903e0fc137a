"""The sub-command ``vm build``: makes the image of the VM under test."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from netplugin_zeroloss.cli.frame import Commands, add_quiet, ends_cleanly, progress
from netplugin_zeroloss.cli.options import whole
from netplugin_zeroloss.values import UnusableInput
from netplugin_zeroloss.vm.image import FOLDER

if TYPE_CHECKING:
    from netplugin.libvirt.vm_image import Image
    from netplugin_zeroloss.vm.spec import VmSpec


def add_vm(commands: Commands) -> None:
    parser = commands.add_parser(
        "vm", help="make the image of the VM under test", description="Make the image of the VM under test."
    )
    actions = parser.add_subparsers(
        dest="action", required=True, metavar="COMMAND", help="each has a --help of its own"
    )
    build = actions.add_parser(
        "build",
        help="make the image of the VM under test, or find the one of the same inputs",
        description="Make an image of the VM under test: Debian with SSH, testpmd, VPP if it is given, and"
        " the settings that `netplugin guest plan` prints. An image is built once for the same options and"
        " files. Exit status: 0 if the image is there.",
    )
    build.set_defaults(command=_build)
    folder = "folder of images and keys; its link `latest` leads to the image (default: %(default)s)"
    build.add_argument("--folder", metavar="FOLDER", type=Path, default=FOLDER, help=folder)
    build.add_argument("--rebuild", action="store_true", help="build also if there is one of these inputs")
    add_quiet(build)
    _add_system(build)


#: Options of what is built: name, what it takes (None: nothing), and its help.
_SYSTEM: tuple[tuple[str, str | None, str], ...] = (
    (
        "--base",
        "FILE",
        "take the root file system of this disk image (qcow2 or raw) or archive (tar), which is only read;"
        " default: mmdebstrap makes one",
    ),
    ("--suite", "NAME", "Debian's release (default: bookworm)"),
    ("--sources", "FILE", "apt's sources, as in /etc/apt (default: Debian's mirror)"),
    ("--snapshot", "TIME", "take packages as they were then, from snapshot.debian.org: 20261101T000000Z"),
    ("--no-install", None, "install no packages in the base, which has them"),
    ("--kernel", "PACKAGE", "kernel (default: linux-image-amd64)"),
    ("--no-testpmd", None, "leave testpmd and DPDK out"),
    ("--package", "NAME", "install this one too, of a version with NAME=VERSION; may be given several times"),
    ("--vpp", "FOLDER", "folder with VPP's .deb files, or an installed tree (bin/vpp)"),
    ("--ssh-key", "FILE", "private key for SSH, FILE.pub next to it (default: one is made in the folder)"),
    ("--vcpus", "N", "vCPUs (default: 8)"),
    ("--memory-mb", "N", "memory, MB (default: 8192)"),
    ("--disk-mb", "N", "size of the disk, MB (default: 8192)"),
    ("--hugepage-mb", "N", "hugepages in the VM, MB (default: half of its memory)"),
    ("--hugepage-kb", "N", "their size, KB: 2048 or 1048576"),
    ("--housekeeping", "N", "vCPUs that DPDK leaves alone, the lowest (default: 1)"),
    (
        "--driver",
        "DRIVER",
        "driver of the NICs under test in the VM: uio_pci_generic, or vfio-pci without an IOMMU, for"
        " kernels that have this mode (default: uio_pci_generic for virtio, else vfio-pci with an emulated"
        " IOMMU)",
    ),
)
_TYPES: dict[str, Callable[[str], object]] = {"FILE": Path, "FOLDER": Path, "N": whole(0, 1 << 26)}


def _add_system(build: argparse.ArgumentParser) -> None:
    for name, takes, what in _SYSTEM:
        if takes is None:
            build.add_argument(
                name, dest=name.removeprefix("--no-"), action="store_false", default=None, help=what
            )
        elif name == "--package":
            build.add_argument(name, dest="packages", metavar=takes, action="append", help=what)
        else:
            build.add_argument(name, metavar=takes, type=_TYPES.get(takes, str), help=what)


def _build(options: argparse.Namespace) -> int:
    # Imported here: the sub-command ``search`` works without these dependencies.
    from netplugin.api.errors import NetpluginError
    from netplugin_zeroloss.vm.build import Builder

    spec = _spec(options)
    builder = Builder(options.folder, options.ssh_key, progress(options.quiet))
    with ends_cleanly():
        try:
            image = builder.build(spec, options.rebuild)
        except NetpluginError as error:
            raise UnusableInput("vm build", "; ".join(filter(None, (error.detail, error.fix)))) from error
    _report(image, options.folder)
    return 0


def _spec(options: argparse.Namespace) -> VmSpec:
    """Raises: UnusableInput with all options that are not valid."""
    from pydantic import ValidationError

    from netplugin.api.field_errors import message
    from netplugin.tuning.guest.settings import GuestOptions
    from netplugin_zeroloss.matrix.yaml_model import read_text
    from netplugin_zeroloss.vm.spec import VmSpec

    values = vars(options) | {
        "sources": read_text(options.sources) if options.sources else None,
        "epoch": os.environ.get("SOURCE_DATE_EPOCH"),
    }
    given = {name: value for name, value in values.items() if value is not None}
    mine = {name: given[name] for name in VmSpec.model_fields if name in given}
    guest = {name: given[name] for name in GuestOptions.model_fields if name in given}
    try:
        return VmSpec.model_validate(mine | {"guest": guest})
    except ValidationError as error:
        lines = [": ".join(filter(None, (_option(each["loc"]), message(each)))) for each in error.errors()]
        raise UnusableInput("vm build", "\n".join(lines)) from error


def _option(location: tuple[int | str, ...]) -> str:
    """Return the option of a field: ``("guest", "hugepage_kb")`` is ``--hugepage-kb``."""
    names = [str(part) for part in location if isinstance(part, str) and part != "guest"]
    if not names:
        return ""
    spelled = {"packages": "package", "epoch": "SOURCE_DATE_EPOCH"}.get(names[0], names[0])
    return spelled if spelled.isupper() else f"--{spelled.replace('_', '-')}"


def _report(image: Image, folder: Path) -> None:
    packages = image.manifest.packages
    has = [
        f"{name} {packages[package]}"
        for name, package in (("testpmd (DPDK)", "dpdk-dev"), ("VPP", "vpp"))
        if package in packages
    ]
    made = image.manifest
    print(f"image    {image.folder}")
    print(f"system   {made.origin}, {len(packages)} packages; {', '.join(has) or 'neither testpmd nor VPP'}")
    print(f"size     {made.vcpus} vCPUs, {made.memory_mb} MB; NICs under test: {made.driver}")
    print(f"kernel   {made.arguments}")
    print(f"digest   {made.tree}  (of all files of its root file system)")
    print(
        "\nNext: cp tools/trex/matrix.yaml mine.yaml, fill it in"
        f" (vm: {{image: {folder / 'latest'}}}), and netplugin-zeroloss doctor mine.yaml"
    )

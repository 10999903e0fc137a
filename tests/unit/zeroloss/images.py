"""A made-up image of the VM, for what only needs its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from netplugin.libvirt.vm_image import (
    DISK,
    INITRD,
    KERNEL,
    KEY,
    KNOWN_HOSTS,
    MANIFEST,
    MEASURED,
    Image,
    Manifest,
    read,
    sha256,
    written,
)


def made_up_image(folder: Path, key: Path | None = None, **fields: Any) -> Image:
    """An image of a VM with 8 vCPUs and 8 GB, whose files say only what they are.

    ``fields`` of its manifest are as given."""
    folder.mkdir(parents=True)
    for name in (DISK, KERNEL, INITRD):
        (folder / name).write_text(f"the {name}\n")
    if key is not None:
        (folder / KEY).symlink_to(key)
        (folder / KNOWN_HOSTS).write_text("* ssh-ed25519 AAAA\n")
    manifest = Manifest.model_validate(
        {
            "layout": 1,
            "key": "0123",
            "vcpus": 8,
            "memory_mb": 8192,
            "arguments": "root=/dev/vda rw hugepages=2048",
            "driver": "uio_pci_generic (virtio), vfio-pci",
            "iommu": True,
            "digests": {name: sha256(folder / name) for name in MEASURED},
            "tree": "4567",
            "packages": {"dpdk-dev": "22.11"},
            "epoch": 1,
            "origin": "Debian bookworm",
            **fields,
        }
    )
    (folder / MANIFEST).write_text(written(manifest))
    return read(folder)

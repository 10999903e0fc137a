"""The image of the VM under test in a folder, and which was built last."""

from __future__ import annotations

from pathlib import Path

from netplugin.api.errors import InvalidRequest
from netplugin.libvirt import vm_image
from netplugin.libvirt.vm_image import Image
from netplugin_zeroloss.values import UnusableInput

#: Link in the folder of images to the image that was built last.
LATEST = "latest"


def read(folder: Path) -> Image:
    """Read the image in a folder. Raises: UnusableInput if there is none."""
    try:
        return vm_image.read(folder)
    except InvalidRequest as error:
        raise UnusableInput(str(folder), error.detail.removeprefix(f"{folder}: ")) from error

"""The VM under test: its image, built once and cached, and the domain of each VM that runs on it."""

from pathlib import Path

#: Folder of images, unless ``vm build --folder`` names another.
FOLDER = Path("/var/lib/netplugin-zeroloss")

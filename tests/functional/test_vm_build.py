"""A real image of the VM, as small as it can be, boots and is as the plan of the guest has it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from netplugin_zeroloss.vm import image

from netplugin.libvirt.image_domain import NICS
from tests.docs.blocks import ROOT
from tests.lab.apt import SOURCE_PARTS

pytestmark = [pytest.mark.long, pytest.mark.outside]

SMALL = ("--kernel", "linux-image-cloud-amd64", "--no-testpmd")
SIZE = ("--vcpus", "2", "--memory-mb", "1024", "--disk-mb", "2048")


def build(folder: Path, *more: str) -> str:
    """The command's output. apt's sources are those of this machine, if they are in one file of their own."""
    command = [sys.executable, str(ROOT / "tools/trex/zeroloss.py"), "vm", "build", "--folder", str(folder)]
    sources = SOURCE_PARTS / "debian.sources"
    given = ["--sources", str(sources)] if sources.exists() else []
    done = subprocess.run(
        [*command, *SMALL, *SIZE, *given, *more], capture_output=True, text=True, timeout=1500, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_an_image_boots_and_answers_by_ssh(tmp_path: Path) -> None:
    folder = tmp_path / "vm"
    assert "Next: " in build(folder)
    made = image.read(folder / "latest")
    assert {"openssh-server", "driverctl", "linux-image-cloud-amd64"} <= made.manifest.packages.keys()
    assert "has these inputs already" in build(folder)

    boot = [sys.executable, "-m", "tests.functional.vm_boot", str(made.folder)]
    sandbox = [sys.executable, "-m", "tests.lab.sandbox", "--"]
    done = subprocess.run(
        [*sandbox, *boot], cwd=ROOT, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["arguments"] == made.manifest.arguments and int(seen["hugepages"]) == 256
    assert seen["hostname"] == "zeroloss" and len(seen["machine"]) == 32 and seen["failed"] == ""
    assert seen["stat_interval"] == "10", "of the guest plan"
    assert [seen[nic] for nic in NICS[:2]] == ["uio_pci_generic", "vfio-pci"]
    assert set(seen["hosts"].split()) == {f"/etc/ssh/ssh_host_ed25519_key{end}" for end in ("", ".pub")}, (
        "no key is made in it"
    )
    assert seen["shutdown"], f"it shut down by itself: {seen['log']}"
    assert list(made.damage()) == [] and list((made.folder / "overlays").iterdir()) == []
    tree = made.manifest.tree
    build(folder, "--rebuild")
    assert image.read(folder / "latest").manifest.tree == tree, "the same files from the same packages"

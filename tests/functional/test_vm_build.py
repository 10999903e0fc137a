"""A real image of the VM, as small as it can be: it boots, is as the plan of the guest has it, and is the VM
of a run with testpmd in it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from netplugin_zeroloss.vm import image

from netplugin.libvirt.image_domain import NICS
from tests.docs.blocks import ROOT
from tests.lab.apt import SOURCE_PARTS

pytestmark = [pytest.mark.long, pytest.mark.outside]

SMALL = ("--kernel", "linux-image-cloud-amd64")
SIZE = ("--vcpus", "2", "--memory-mb", "1024", "--disk-mb", "3072")
BACKENDS = ["linuxbridge", "dpdkvhostuser"]


def build(folder: Path, *more: str, small: tuple[str, ...] = SMALL) -> str:
    """The command's output. apt's sources are those of this machine, if they are in one file of their own."""
    command = [sys.executable, str(ROOT / "tools/trex/zeroloss.py"), "vm", "build", "--folder", str(folder)]
    sources = SOURCE_PARTS / "debian.sources"
    given = ["--sources", str(sources)] if sources.exists() else []
    done = subprocess.run(
        [*command, *small, *SIZE, *given, *more], capture_output=True, text=True, timeout=1500, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of images, with one that these tests share."""
    made = tmp_path_factory.mktemp("vm")
    assert "Next: " in build(made)
    return made


def in_a_sandbox(seconds: float, hugepages: int, *command: str | Path) -> Any:
    """What a module that runs in a sandbox prints as JSON."""
    sandbox = [sys.executable, "-m", "tests.lab.sandbox", "--hugepages", str(hugepages), "--"]
    done = subprocess.run(
        [*sandbox, sys.executable, "-m", *map(str, command)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_an_image_boots_and_answers_by_ssh(folder: Path) -> None:
    made = image.read(folder / "latest")
    assert {"openssh-server", "driverctl", "linux-image-cloud-amd64"} <= made.manifest.packages.keys()
    assert "has these inputs already" in build(folder)

    seen = in_a_sandbox(900, 0, "tests.functional.vm_boot", made.folder)
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


def test_testpmd_in_the_vm_is_the_vnf_of_a_run(folder: Path, tmp_path: Path) -> None:
    """The run is killed in its first search and resumed. Its verdicts are those of an emulated CPU."""
    cell = ("tests.functional.vm_cell", folder / "latest", tmp_path, "--backends", *BACKENDS)
    seen = in_a_sandbox(3600, 800, *cell)
    assert seen["status"] in (0, 1), seen["errors"]
    assert "dpdk-testpmd" not in seen["after_kill"] and "sshd" in seen["after_kill"], (
        "what a killed run leaves in the VM is no testpmd"
    )
    assert [cell["backend"] for cell in seen["cells"]] == BACKENDS
    for cell in seen["cells"]:
        assert (cell["vnf"]["name"], cell["vnf"]["rx_queues"]) == ("testpmd", [1, 1])
        command = cell["vnf"]["configuration"]["command"]
        assert f"-a {NICS[0]} -a {NICS[1]} " in command
        assert "--lcores 0@0,1@1 " in command, "the vCPU that the plan of the guest isolates"
        assert cell["forwarded"] > 0 and f"| {cell['backend']} |" in seen["printed"]
    assert seen["ports"] == [200, []] and seen["domains"] == []
    assert list(image.read(folder / "latest").damage()) == []
    assert list((folder / "latest" / "overlays").iterdir()) == []

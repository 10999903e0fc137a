"""An image of the VM from a disk image that is given, and a domain on it: libvirt and QEMU take its XML, and
only the overlay is written. What boots is in test_vm_build."""

from __future__ import annotations

import shutil
import socket
import subprocess
from pathlib import Path

import pytest
from netplugin_zeroloss.matrix.bench import CellError
from netplugin_zeroloss.matrix.description import Vm
from netplugin_zeroloss.matrix.domain import DomainRunner
from netplugin_zeroloss.vm.build import Builder
from netplugin_zeroloss.vm.spec import VmSpec

from netplugin.libvirt.guest import read_domain
from netplugin.libvirt.image_domain import NICS
from netplugin.libvirt.vm_image import Image, sha256
from netplugin.tuning.guest.settings import GuestOptions
from tests.functional.vm_boot import MACS, with_nics
from tests.lab import kernel
from tests.lab.libvirtd import PrivateLibvirt

NAME, PORT = "zeroloss-x", 22023
#: Sectors before the partition, as tools lay it out.
FIRST = 2048


def base_image(folder: Path, partitioned: bool) -> Path:
    """A disk of 24 MB whose root file system has a kernel and nothing to boot into, as qcow2."""
    root, raw = folder / "base-root", folder / "base.raw"
    (root / "boot").mkdir(parents=True)
    shutil.copyfile(kernel.cached().image, root / "boot/vmlinuz-1")
    (root / "boot/initrd.img-1").write_bytes(b"")
    (root / "etc").mkdir()
    (root / "etc/hostname").write_text("builder\n")
    (root / "etc/owned").touch()
    shutil.chown(root / "etc/owned", 1234, 1234)
    subprocess.run(["mke2fs", "-q", "-t", "ext4", "-d", str(root), str(raw), "24M"], check=True)
    if partitioned:
        content = raw.read_bytes()
        # One entry of type 0x83 in a table of the old kind (MBR): boot flag, CHS, type, CHS, LBA.
        entry = bytes([0x80, 0, 0, 0, 0x83, 0, 0, 0])
        entry += FIRST.to_bytes(4, "little") + (len(content) // 512).to_bytes(4, "little")
        table = bytes(446) + entry + bytes(48) + b"\x55\xaa"
        raw.write_bytes(table + bytes(FIRST * 512 - len(table)) + content)
    base = folder / "base.qcow2"
    subprocess.run(["qemu-img", "convert", "-O", "qcow2", str(raw), str(base)], check=True)
    return base


def built(folder: Path, partitioned: bool = False) -> Image:
    base = base_image(folder, partitioned)
    before = sha256(base)
    spec = VmSpec(
        base=base, install=False, disk_mb=32, vcpus=1, memory_mb=128, guest=GuestOptions(hugepage_mb=0)
    )
    made = Builder(folder / "vm", None, lambda line: None).build(spec)
    assert sha256(base) == before, "the base is only read"
    return made


@pytest.mark.parametrize("partitioned", [False, True])
def test_the_root_file_system_of_a_disk_image_is_the_image(tmp_path: Path, partitioned: bool) -> None:
    made = built(tmp_path, partitioned)
    assert sha256(made.folder / "vmlinuz") == sha256(kernel.cached().image)
    raw = tmp_path / "look.raw"
    subprocess.run(["qemu-img", "convert", "-O", "raw", str(made.disk), str(raw)], check=True)

    def ask(question: str) -> str:
        return subprocess.run(
            ["debugfs", "-R", question, str(raw)], capture_output=True, text=True, check=True
        ).stdout

    assert ask("cat /etc/hostname") == "zeroloss\n" and "User:  1234" in ask("stat /etc/owned")
    assert "uio_pci_generic" in ask(f"cat /etc/driverctl.d/pci-{NICS[0]}")
    subprocess.run(["e2fsck", "-fn", str(raw)], check=True, capture_output=True)
    mounts = Path("/proc/mounts").read_text()
    assert str(tmp_path) not in mounts


def test_a_domain_on_an_image_writes_to_its_overlay_only(tmp_path: Path) -> None:
    made = built(tmp_path)
    before, overlays = sha256(made.disk), made.folder / "overlays"
    with PrivateLibvirt() as libvirt:
        vm = Vm(image=made.folder, uri=libvirt.uri, ssh_port=PORT, emulate=True)
        domain = DomainRunner(vm, NAME, shutdown_s=0.2)
        assert [each.found for each in domain.findings(Path("/")) if each.missing] == []
        xml = domain.addressed(with_nics(domain.template), MACS)
        with domain.running(xml):
            running = libvirt.connect().lookupByName(NAME)
            there = read_domain(running.XMLDesc())
            assert {nic.mac: nic.address for nic in there.nics} == dict(zip(MACS, NICS, strict=False))
            assert [file.name for file in overlays.iterdir() if file.suffix == ".qcow2"] == [f"{NAME}.qcow2"]
            with socket.create_connection(("127.0.0.1", PORT), timeout=10):
                pass  # QEMU listens for the VM
            held = {
                (link.readlink(), (link.parents[1] / "fdinfo" / link.name).read_text().split()[3][-1])
                for link in Path(f"/proc/{pid_of(NAME)}/fd").iterdir()
            }
            assert (made.disk, "0") in held, "QEMU has the base open for reading (O_RDONLY)"
        assert not domain.is_running and list(overlays.iterdir()) == []
        # What a killed run left is removed by the next.
        made.make_overlay(NAME)
        domain.remove()
        assert list(overlays.iterdir()) == []
        with pytest.raises(CellError, match="is no image any more"), domain.running(xml):
            made.disk.chmod(0o644)
            with made.disk.open("ab") as disk:
                disk.write(b"x")
        assert sha256(made.disk) != before and list(made.damage())


def pid_of(name: str) -> int:
    return int(Path(f"/run/libvirt/qemu/{name}.pid").read_text())

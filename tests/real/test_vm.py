"""The VM of these tests: reached by SSH, with drivers for VPP."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from netplugin_zeroloss.machines import Ssh, SshMachine

from tests.functional.conftest import BASE
from tests.lab.libvirtd import PrivateLibvirt
from tests.real.vm import ADDRESS, VmFiles, vm_files

BOOT_S = 240.0


@pytest.fixture
def files(tmp_path: Path) -> Iterator[VmFiles]:
    BASE.mkdir(parents=True, exist_ok=True)
    with vm_files(tmp_path, vcpus=2, memory_mb=512, hugepages=32) as made:
        yield made


def test_commands_and_programs_run_in_it(files: VmFiles) -> None:
    with PrivateLibvirt(BASE / "libvirt") as libvirt:
        domain = libvirt.connect().createXML(files.domain.read_text(), 0)
        machine = Ssh(SshMachine(**files.ssh.machine(ADDRESS)), time.monotonic() + BOOT_S)
        try:
            assert machine.run(["cat", "/proc/sys/vm/nr_hugepages"]) == "32\n"
            assert "uio_pci_generic" in machine.run(["lsmod"])
            machine.write(f"{machine.directory}/x", "a\nb\n")
            assert machine.run(["cat", f"{machine.directory}/x"]) == "a\nb\n"
            program = machine.program("sleeper", ["sleep", "1000"])
            program.start()
            program.check()
            program.stop()
        finally:
            machine.close()
        domain.destroy()

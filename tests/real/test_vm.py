"""The VM of these tests: reached by SSH and by its console, with drivers for VPP."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from netplugin_zeroloss.machines import choose
from netplugin_zeroloss.machines.contract import ConsoleMachine, SshMachine

from tests.functional.conftest import BASE
from tests.lab.libvirtd import PrivateLibvirt
from tests.real.vm import ADDRESS, VmFiles, vm_files

BOOT_S = 240.0


@pytest.fixture
def files(tmp_path: Path) -> Iterator[VmFiles]:
    BASE.mkdir(parents=True, exist_ok=True)
    with vm_files(tmp_path, BASE / "console", vcpus=2, memory_mb=512, hugepages=32) as made:
        yield made


def test_it_is_reached_both_ways(files: VmFiles) -> None:
    """The same checks and programs on both."""
    with PrivateLibvirt(BASE / "libvirt") as libvirt:
        domain = libvirt.connect().createXML(files.domain.read_text(), 0)
        ways = (
            ConsoleMachine(type="console", path=str(files.console)),
            SshMachine(**files.ssh.machine(ADDRESS)),
        )
        for way in ways:
            machine = choose.make(way, time.monotonic() + BOOT_S)
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

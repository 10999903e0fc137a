"""The NICs of the guest, for the tests in it: two igb on one hub, the PF and the wire's far end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.lab.processes import LabError, run, wait_for
from tests.nested.machine import PF, WIRE, Nic

__all__ = ["PF", "WIRE", "Nic", "device", "interface", "modprobe", "virtual_functions"]

PROBE_DEADLINE_S = 30.0


def device(pci: str) -> Path:
    """A PCI device in sysfs."""
    return Path("/sys/bus/pci/devices") / pci


def interface(pci: str) -> str:
    """The network interface of a PCI device in this network namespace."""
    names = os.listdir(device(pci) / "net") if (device(pci) / "net").is_dir() else []
    if len(names) != 1:
        raise LabError(f"{pci} has {len(names)} interfaces here: {names}")
    return names[0]


def modprobe(*modules: str) -> None:
    run(["modprobe", "--all", *modules], timeout=60)


@contextmanager
def virtual_functions(nic: Nic, number: int, autoprobe: bool = False) -> Iterator[list[str]]:
    """Make a NIC's virtual functions for the time of the block; gives their PCI addresses.

    With `autoprobe` the kernel binds what driver there is to them, if it is loaded.
    """
    root = device(nic.pci)
    (root / "sriov_drivers_autoprobe").write_text("1" if autoprobe else "0")
    (root / "sriov_numvfs").write_text(str(number))
    try:
        links = [root / f"virtfn{index}" for index in range(number)]
        wait_for(lambda: all(link.exists() for link in links), PROBE_DEADLINE_S, f"{links}")
        yield [link.resolve().name for link in links]
    finally:
        (root / "sriov_numvfs").write_text("0")

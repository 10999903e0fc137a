"""A guest's playbook played for real by Ansible, on a NIC that is files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from netplugin.host.cpus import online
from netplugin.tuning.guest.plan import GuestPlan
from netplugin.tuning.guest.playbook import guest_playbook
from tests.lab.ansible import play
from tests.lab.processes import run
from tests.unit.tuning.guests import planned

MAC, ADDRESS = "52:54:00:00:00:02", "0000:02:00.0"
FACT = Path("/etc/ansible/facts.d/netplugin_guest.fact")


def written(plan: GuestPlan, path: Path) -> Path:
    path.write_text(guest_playbook(plan))
    return path


@dataclass(frozen=True)
class Guest:
    """A NIC in files where the kernel has them, and programs that take down how they are called."""

    folder: Path

    @property
    def calls(self) -> list[str]:
        log = self.folder / "log"
        return log.read_text().splitlines() if log.exists() else []

    def has_no_nic(self) -> None:
        shutil.rmtree(self.folder / "net" / "ens2")


@pytest.fixture
def guest(tmp_path: Path) -> Iterator[Guest]:
    """One virtio NIC, with its driver; driverctl binds it, after which the kernel has no device of it."""
    made = Guest(tmp_path / "guest")
    device = made.folder / f"pci0000:00/{ADDRESS}/virtio3"
    nic, driver = made.folder / "net/ens2", made.folder / f"devices/{ADDRESS}/driver"
    programs = made.folder / "bin"
    for folder in (device, nic, driver.parent, programs, made.folder / "module/vfio/parameters"):
        folder.mkdir(parents=True)
    (nic / "device").symlink_to(device)
    for name, text in (
        ("address", MAC),
        ("mtu", "1500"),
        ("operstate", "up"),
        ("type", "1"),
        ("flags", "0x1003"),
    ):
        (nic / name).write_text(f"{text}\n")
    for name in ("virtio-pci", "vfio-pci"):
        (made.folder / "drivers" / name).mkdir(parents=True)
    driver.symlink_to(made.folder / "drivers/virtio-pci")
    (made.folder / "module/vfio/parameters/enable_unsafe_noiommu_mode").write_text("N\n")
    bind = f'ln -sfn "{made.folder}/drivers/$3" "{driver}"; rm -r "{nic}"'
    for name, more in (("modprobe", ""), ("driverctl", bind)):
        (programs / name).write_text(f'#!/bin/sh -eu\necho "{name} $*" >> "{made.folder}/log"\n{more}\n')
        (programs / name).chmod(0o755)
    shutil.copytree("/etc", made.folder / "etc", symlinks=True)
    with ExitStack() as stack:
        for source, path in (
            ("net", "/sys/class/net"),
            ("devices", "/sys/bus/pci/devices"),
            ("module", "/sys/module"),
            ("etc", "/etc"),
        ):
            run(["mount", "--no-mtab", "--bind", made.folder / source, path])
            stack.callback(run, ["umount", "--no-mtab", path])
        yield made


def binding(**options: object) -> GuestPlan:
    """What of the plan is about NICs, for this machine's CPUs."""
    plan = planned("router", dpdk=(MAC,), **options)
    nics = tuple(replace(nic, channels=None, mtu=None) for nic in plan.nics)
    here = frozenset(online())
    return replace(plan, steps=(), housekeeping=here, isolated=frozenset(), nics=nics)


def without_packages(book: Path) -> Path:
    """The programs are here already, and a package would be fetched."""
    text = book.read_text()
    assert "state: present" in text
    book.write_text(text.replace("state: present", "state: present\n      when: false"))
    return book


def test_a_nic_is_found_by_its_mac_and_bound_once(guest: Guest, tmp_path: Path) -> None:
    book = without_packages(written(binding(), tmp_path / "guest.yml"))
    env = {"PATH": f"{guest.folder / 'bin'}:{os.environ['PATH']}"}
    first = play(tmp_path, book, env=env)
    assert {"Bind them to vfio-pci", "Let VFIO do without an IOMMU"} <= first.changes
    assert f"driverctl set-override {ADDRESS} vfio-pci" in guest.calls
    parameter = guest.folder / "module/vfio/parameters/enable_unsafe_noiommu_mode"
    assert parameter.read_text().strip() == "Y"
    modprobe = Path("/etc/modprobe.d/netplugin-guest.conf").read_text().splitlines()
    assert modprobe[1:] == ["options vfio enable_unsafe_noiommu_mode=1"]
    assert json.loads(FACT.read_text()) == {MAC: ADDRESS}

    # Now the kernel has no NIC of this address any more.
    parameter.write_text("Y\n")
    second = play(tmp_path, book, env=env)
    assert (second.changed, second.changes) == (0, set())
    assert [call for call in guest.calls if "override" in call] == [
        f"driverctl set-override {ADDRESS} vfio-pci"
    ]


def test_what_is_not_there_is_not_bound(guest: Guest, tmp_path: Path) -> None:
    guest.has_no_nic()
    book = without_packages(written(binding(driver="uio_pci_generic"), tmp_path / "guest.yml"))
    env = {"PATH": f"{guest.folder / 'bin'}:{os.environ['PATH']}"}
    with pytest.raises(Exception, match=f"No NIC has the MAC address {MAC}"):
        play(tmp_path, book, env=env)
    assert guest.calls == ["modprobe uio_pci_generic"]

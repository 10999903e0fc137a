"""What is unpacked of a newer Debian to run its Open vSwitch, and which programs are taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab import apt
from tests.lab.apt import Missing, PrivateApt
from tests.lab.ovs_releases import OvsPrograms, chosen, driver_packages, unpacked
from tests.lab.processes import LabError


def test_drivers_are_of_the_abi_of_the_dpdk_that_comes_along() -> None:
    found = driver_packages([Missing("libc6", "2.43"), Missing("librte-eal26", "25.11")])
    assert "librte-bus-vdev26" in found and "librte-net-e1000-26" in found
    with pytest.raises(LabError, match="without DPDK"):
        driver_packages([Missing("libc6", "2.43")])


def test_libraries_and_open_vswitch_are_unpacked_and_programs_of_others_are_not() -> None:
    names = ("libc6", "zlib1g", "openvswitch-common", "systemd", "libpython3.13-stdlib", "python3")
    kept = unpacked(Missing(name, "1") for name in names)
    assert [one.name for one in kept] == ["libc6", "zlib1g", "openvswitch-common"]


def test_an_apt_of_one_suite_knows_no_other_and_no_installed_package(tmp_path: Path) -> None:
    mirror = (tmp_path / "debian").as_uri()
    PrivateApt(tmp_path / "apt", apt.sources([mirror], "forky"))
    (source,) = (tmp_path / "apt/sources.list.d").iterdir()
    assert source.read_text().endswith(f" {mirror} forky main\n")
    settings = (tmp_path / "apt/apt.conf").read_text()
    assert 'Dir::Etc::sourcelist "/dev/null";' in settings and 'Dir::State::status "/dev/null";' in settings


def test_the_programs_are_those_that_path_has_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "usr/bin/ovs-vsctl"
    tool.parent.mkdir(parents=True)
    tool.write_text("#!/bin/sh\necho 'ovs-vsctl (Open vSwitch) 9.8.7'\necho 'DB Schema 8.8.0'\n")
    tool.chmod(0o755)
    # As on a machine whose /bin is a link.
    (tmp_path / "bin").symlink_to("usr/bin")
    newer = OvsPrograms(tmp_path / "usr")
    monkeypatch.setenv("PATH", newer.path(f"{tmp_path / 'bin'}:/usr/bin"))
    assert OvsPrograms.in_path() == newer and newer.version == (9, 8, 7)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin")
    assert OvsPrograms.in_path() == newer
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    with pytest.raises(LabError, match="no ovs-vsctl"):
        OvsPrograms.in_path()


def test_a_sandbox_fetches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.lab.ovs_releases.CACHE", tmp_path)
    with pytest.raises(LabError, match=r"tests\.lab\.ovs_releases forky"):
        chosen("forky", fetched=True)
    (tmp_path / "ovs-forky-4.0.0-2").mkdir()
    assert chosen("forky", fetched=True) == OvsPrograms(tmp_path / "ovs-forky-4.0.0-2/usr")

"""Whether a real vswitchd starts with the ``dpdk-extra`` that the plan and the findings advise."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from netplugin.host.ovs_versions import (
    may_not_start,
    parse_version,
    setting_dpdk_extra,
    with_no_device,
    with_pci,
)
from tests.lab.kernel import CACHE
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import LabError, run

DIRECTORY = Path("/run/np/start")
KEY = "dpdk-extra"


@pytest.fixture
def stopped() -> Iterator[PrivateOvs]:
    """An OVS-DPDK whose vswitchd does not run."""
    with PrivateOvs(DIRECTORY) as private:
        private.stop_vswitchd()
        yield private
        private.set_other_config({KEY: with_no_device({})}, wait=False)
    shutil.rmtree(DIRECTORY)


def starts(ovs: PrivateOvs, extra: str) -> bool:
    """With what the command sets that an operator is told."""
    ovs.stop_vswitchd()
    command = setting_dpdk_extra(extra).replace("ovs-vsctl", f"ovs-vsctl --db={ovs.connection}")
    run(["sh", "-c", command])
    assert ovs.get("Open_vSwitch", ".", f"other_config:{KEY}") == extra
    try:
        ovs.start_vswitchd()
    except LabError:
        assert not ovs.vswitchd.running and "Cannot init EAL" in ovs.vswitchd.log.read_text()
        return False
    return ovs.dpdk_initialized


@pytest.mark.parametrize("extra", ["--in-memory", "--no-pci"])
def test_ovs_starts_with_what_is_advised(stopped: PrivateOvs, extra: str) -> None:
    version = parse_version(stopped.get("Open_vSwitch", ".", "ovs_version"))
    found = {KEY: extra}
    advised = with_no_device(found)
    assert starts(stopped, advised) and starts(stopped, with_pci(found))
    assert not may_not_start(version, {KEY: advised})
    if not may_not_start(version, found):
        assert starts(stopped, extra)
    elif stopped.programs.prefix.is_relative_to(CACHE):
        # Of what the lab unpacks DPDK lacks the drivers of some buses.
        assert not starts(stopped, extra)

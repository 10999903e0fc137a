"""Fixtures of the nested tests on virtual functions, and on OVS-DPDK beside them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.ovs import PrivateOvs
from tests.nested import nics
from tests.nested.vfs import far_end, pf_with_vfs


@pytest.fixture(scope="module")
def pf() -> Iterator[str]:
    with pf_with_vfs() as name:
        yield name


@pytest.fixture
def far(pf: str) -> Iterator[str]:
    with far_end() as name:
        yield name


@pytest.fixture(scope="package")
def ovs() -> Iterator[PrivateOvs]:
    """With no device of its own choice: it takes those of its ports. One for all tests in a guest."""
    nics.modprobe("vfio-pci")  # DPDK looks for it once, when it starts
    config = {"dpdk-extra": "-a 0000:00:00.0 --in-memory", "per-port-memory": "true"}
    with PrivateOvs(Path("/run/np-ovs"), pmd_mask="0x2", other_config=config) as private:
        yield private

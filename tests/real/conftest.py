"""The trees that these tests need, and a private hypervisor."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.lab import sandbox


def pytest_collection_modifyitems() -> None:
    if not sandbox.inside():
        pytest.exit("these tests run in a sandbox: tox -e real", returncode=2)


def _tree(variable: str, program: str) -> Path:
    named = os.environ.get(variable)
    if not named:
        pytest.skip(f"{variable} names no tree")
    path = Path(named)
    assert (path / program).is_file(), f"{variable}: {path} has no {program}"
    return path


@pytest.fixture
def trex() -> Path:
    """The directory of t-rex-64: ``scripts`` of a tree that was built, or an unpacked release."""
    return _tree("NETPLUGIN_TREX_DIR", "t-rex-64")


@pytest.fixture
def vpp() -> Path:
    """A folder with ``bin/vpp`` and its plug-ins below ``lib``."""
    return _tree("NETPLUGIN_VPP_DIR", "bin/vpp")

"""The trees that these tests need, and a private hypervisor."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.lab import sandbox
from tests.real import needs


def pytest_collection_modifyitems() -> None:
    if not sandbox.inside():
        pytest.exit("these tests run in a sandbox: tox -e real", returncode=2)
    if missing := list(needs.packages()):
        pytest.exit("\n".join(missing), returncode=2)


def _tree(variable: str) -> Path:
    wrong = dict(needs.trees()).get(variable)
    if not os.environ.get(variable):
        pytest.skip(wrong or variable)
    assert wrong is None, wrong
    return Path(os.environ[variable])


@pytest.fixture
def trex() -> Path:
    """The directory of t-rex-64: ``scripts`` of a tree that was built, or an unpacked release."""
    return _tree("NETPLUGIN_TREX_DIR")


@pytest.fixture
def vpp() -> Path:
    """A folder with ``bin/vpp`` and its plug-ins below ``lib``."""
    return _tree("NETPLUGIN_VPP_DIR")

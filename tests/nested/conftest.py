"""Fixtures of the nested tests on virtual functions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.nested.vfs import far_end, pf_with_vfs


@pytest.fixture(scope="module")
def pf() -> Iterator[str]:
    with pf_with_vfs() as name:
        yield name


@pytest.fixture
def far(pf: str) -> Iterator[str]:
    with far_end() as name:
        yield name

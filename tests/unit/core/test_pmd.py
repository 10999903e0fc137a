"""CPU lists and masks, and the CPUs that a request for PMD threads names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netplugin.api.errors import InvalidRequest
from netplugin.api.pmd_models import PmdRequest
from netplugin.host import cpus
from netplugin.pmd.change import named


@given(st.sets(st.integers(0, 300)))
def test_lists_and_masks_go_both_ways(numbers: set[int]) -> None:
    assert set(cpus.parse_list(cpus.format_list(numbers))) == numbers
    assert set(cpus.from_mask(cpus.to_mask(numbers))) == numbers


def test_cpus_that_are_named() -> None:
    assert named(PmdRequest(cpus="1-2"), (0, 1, 2, 5)) == (1, 2)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (PmdRequest(cpus="3"), "cpus"),
        (PmdRequest(cpus="2-1"), "cpus"),
        (PmdRequest(cpus="0-2,5"), "cpus"),
    ],
)
def test_what_cannot_be_names_the_field(request_: PmdRequest, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        named(request_, (0, 1, 2, 5))
    assert [error.field for error in refused.value.errors] == [field]

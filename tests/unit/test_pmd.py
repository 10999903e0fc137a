"""CPU lists, masks, and what vswitchd tells of its PMD threads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netplugin.errors import InvalidRequest
from netplugin.host import cpus
from netplugin.host.pmd import choose
from netplugin.host.vswitchd import parse_pmd
from netplugin.models import PmdRequest

RXQ = """pmd thread numa_id 0 core_id 2:
  isolated : true
  port: npv1              queue-id:  0 (enabled)   pmd usage: 12 %
  port: npv1              queue-id:  1 (disabled)  pmd usage: NOT AVAIL
  overhead:  3 %
pmd thread numa_id 1 core_id 18:
  isolated : false
"""
STATS = """pmd thread numa_id 0 core_id 2:
  packets received: 10
  idle cycles: 900 (90.00%)
  processing cycles: 100 (10.00%)
pmd thread numa_id 1 core_id 18:
  packets received: 0
main thread:
  packets received: 0
  processing cycles: 7 (99.00%)
"""


def test_pmd_threads_are_read() -> None:
    first, second = parse_pmd(RXQ, STATS)
    assert (first.cpu, first.numa_node, first.isolated, first.busy_percent) == (2, 0, True, 10.0)
    assert [(q.queue, q.enabled, q.usage_percent) for q in first.queues] == [
        (0, True, 12),
        (1, False, None),
    ]
    assert (second.cpu, second.numa_node, second.busy_percent, second.queues) == (18, 1, None, ())


@given(st.sets(st.integers(0, 300)))
def test_lists_and_masks_go_both_ways(wanted: set[int]) -> None:
    assert set(cpus.parse_list(cpus.format_list(wanted))) == wanted
    assert set(cpus.from_mask(cpus.to_mask(wanted))) == wanted


def test_count_takes_the_highest_cpus() -> None:
    assert choose(PmdRequest(count=2), (0, 1, 2, 5)) == (2, 5)
    assert choose(PmdRequest(cpus="1-2"), (0, 1, 2, 5)) == (1, 2)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (PmdRequest(count=4), "count"),
        (PmdRequest(count=5), "count"),
        (PmdRequest(cpus="3"), "cpus"),
        (PmdRequest(cpus="2-1"), "cpus"),
        (PmdRequest(cpus="0-2,5"), "cpus"),
    ],
)
def test_what_cannot_be_names_the_field(request_: PmdRequest, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        choose(request_, (0, 1, 2, 5))
    assert [error.field for error in refused.value.errors] == [field]

"""What control groups of version 2 take away, on a machine that has none of version 1."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from netplugin.tuning.read.cpus import CGROUP, read_cpus
from netplugin.tuning.root import Root
from tests.lab.cgroups import of_cpu_0

pytestmark = [pytest.mark.nested(cpus=2, memory_mb=2560, hugepages=480), pytest.mark.timeout(600)]


def test_a_group_that_gives_less_is_a_finding() -> None:
    command = [sys.executable, "-m", "netplugin.cli.main", "host", "check", "-f", "json"]
    with of_cpu_0() as group:
        assert group.version == 2
        check = group.run(command, 180)
    assert check.stderr == ""
    found = [f for f in json.loads(check.stdout) if f["id"] == "cgroup-cpus"]
    assert [f["found"] for f in found] == ["control group /np-limited may run on CPUs 0"]


class OlderRoot(Root):
    """As before Linux 6.8, which does not list the CPUs of all partitions."""

    def _bytes(self, path: str) -> bytes:
        if path == f"{CGROUP}/cpuset.cpus.isolated":
            raise FileNotFoundError
        return super()._bytes(path)


@pytest.fixture
def group() -> Iterator[Path]:
    (Path(CGROUP) / "cgroup.subtree_control").write_text("+cpuset")
    group = Path(CGROUP) / "np-isolated"
    group.mkdir()
    yield group
    (group / "cpuset.cpus.partition").write_text("member")
    group.rmdir()


def test_a_partition_isolates_while_it_is_valid(group: Path) -> None:
    partition = group / "cpuset.cpus.partition"
    for cpus, kind, isolated in (
        ("1", "member", frozenset[int]()),
        ("1", "root", frozenset[int]()),
        ("1", "isolated", frozenset((1,))),
        ("0-1", "isolated", frozenset[int]()),  # it would leave none to the others: it is invalid
    ):
        partition.write_text("member")
        (group / "cpuset.cpus").write_text(cpus)
        partition.write_text(kind)
        for root in (Root(), OlderRoot()):
            facts = read_cpus(root)
            text = partition.read_text()
            assert (facts.partitioned, facts.isolated) == (isolated, isolated), (cpus, text, root)

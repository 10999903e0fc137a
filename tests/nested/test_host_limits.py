"""What control groups of version 2 take away, on a machine that has none of version 1."""

from __future__ import annotations

import json
import sys

import pytest

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

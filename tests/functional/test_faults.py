"""Something goes wrong at one step of an operation, on real daemons: the host still ends as it was asked for.

Each run draws from all (operation, step, fault) by a seed, which it prints. ``NETPLUGIN_FAULTS_SEED`` repeats
one. The long form goes on for ``NETPLUGIN_FAULTS_HOURS`` hours (6) in all, over what
``NETPLUGIN_FAULTS_SHARD`` (such as 2/4; 1/1) leaves of the cases.
"""

from __future__ import annotations

import os
import random

import pytest

from tests.lab.steps.__main__ import SCENES, injected

#: Seconds of faults in the sample of each, and how many operations it has.
SAMPLE_S, SAMPLED = 8.0, 2


def seed() -> int:
    drawn = int(os.environ.get("NETPLUGIN_FAULTS_SEED") or random.randrange(1 << 32))
    print(f"\nNETPLUGIN_FAULTS_SEED={drawn}")
    return drawn


@pytest.mark.parametrize("name", ["dpdkvhostuser", "linuxbridge"])
def test_a_sample(name: str) -> None:
    report = injected(name, SAMPLE_S, seed(), SAMPLED)
    print(report.text())
    assert not report.findings and sum(report.done.values()) > 0, report.text()


@pytest.mark.long
@pytest.mark.parametrize("name", SCENES)
@pytest.mark.timeout(0)
def test_all(name: str) -> None:
    seconds = float(os.environ.get("NETPLUGIN_FAULTS_HOURS") or 6) * 3600 / len(SCENES)
    number, shards = map(int, (os.environ.get("NETPLUGIN_FAULTS_SHARD") or "1/1").split("/"))
    report = injected(name, seconds, seed(), shard=(number, shards))
    print(report.text())
    assert not report.findings, report.text()

"""Plan tuned's variables and profile, if tuned is installed (pure)."""

from __future__ import annotations

from collections.abc import Iterator

from netplugin.host.cpus import format_list
from netplugin.tuning.facts import Facts
from netplugin.tuning.intent import Intent
from netplugin.tuning.planning import sources
from netplugin.tuning.planning.partition import Partition
from netplugin.tuning.root import Unknown
from netplugin.tuning.steps import Effect, Group, Step, TunedProfile, TunedVariable


def tuned_steps(facts: Facts, partition: Partition, intent: Intent) -> Iterator[Step]:
    """Set the same CPUs as in ``isolcpus``; otherwise tuned would revert these settings."""
    tuned = facts.kernel.tuned
    if tuned is None or isinstance(tuned, Unknown) or not partition.isolated:
        return
    profile = "realtime-virtual-host" if intent.realtime else "cpu-partitioning"
    source = sources.TUNED_HOST if intent.realtime else sources.TUNED_PARTITIONING
    yield Step(
        Group.TUNED, TunedVariable(profile, "isolated_cores"), tuned.isolated_cores.get(profile),
        format_list(partition.isolated), Effect.LIVE, "tuned sets masks and priorities by this list",
        source,
    )  # fmt: skip
    yield Step(
        Group.TUNED, TunedProfile(), tuned.profile, profile, Effect.LIVE,
        "another profile would undo this one's settings at the next boot", source,
    )  # fmt: skip

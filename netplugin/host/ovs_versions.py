"""What differs between versions of OVS, from 3.1 to 4.0 (pure).

What the running OVS reports otherwise, such as its interface types, is not decided by its version.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeAlias

Version: TypeAlias = tuple[int, int, int]

#: The first version that splits a large TCP segment if the NIC does not (NEWS, v3.3.0).
_SEGMENTS = (3, 3)
#: The same for frames that go into a tunnel (NEWS, v3.5.0). Before 3.3 no tunnel accepted such a segment.
_SEGMENTS_INTO_TUNNELS = (3, 5)
#: Since then vswitchd probes only the devices of its ports (NEWS, v4.0.0).
_PROBES_NO_MORE = (4, 0)
#: pmd-rxq-assign=group assigns queues by load without a fixed number of queues per thread (NEWS, v2.16.0).
_ASSIGNS_BY_GROUP = (2, 16)
#: "dpif-netdev: Fix dpif_netdev_flow_put": the first fixed release of each series, and of all others.
_MENDED = {(2, 17): 8, (3, 0): 5, (3, 1): 3}
_ALL_MENDED = (3, 2)


def parse_version(text: str | None) -> Version:
    """The numbers of ``ovs_version``; zeros (the oldest) if it is not reported."""
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", text or "")
    return (int(found[1]), int(found[2]), int(found[3] or 0)) if found else (0, 0, 0)


def segments(version: Version) -> bool:
    """Whether OVS splits a large TCP segment where the NIC cannot; else it drops it silently."""
    return version >= _SEGMENTS


def segments_into_tunnels(version: Version) -> bool:
    """The same for segments that go into a tunnel."""
    return version >= _SEGMENTS_INTO_TUNNELS


def probes_all_devices(version: Version) -> bool:
    """Whether vswitchd probes all devices of vfio-pci at its start, unless ``dpdk-extra`` lists some."""
    return version < _PROBES_NO_MORE


def assigns_by_group(version: Version) -> bool:
    """Whether ``pmd-rxq-assign`` may be ``group``."""
    return version >= _ASSIGNS_BY_GROUP


def keeps_old_actions(version: Version) -> bool:
    """Whether a datapath flow may keep its old actions when an OpenFlow table changes.

    OVS keeps overlapping megaflows as long as their actions agree, and modifies each when a table changes.
    The userspace datapath looks up the megaflow to modify with a packet that matches it; versions that are
    not fixed may find an overlapping one. The other keeps its old actions as long as it has traffic: a
    frame that a filter should drop still passes, or a VM stays disconnected. ``revalidator/purge`` deletes
    all megaflows; the next frame of each is translated again with the current tables.
    """
    major, minor, release = version
    if (major, minor) >= _ALL_MENDED:
        return False
    return release < _MENDED.get((major, minor), release + 1)


def sleep_max(other_config: Mapping[str, str]) -> str | None:
    """How long an idle PMD may sleep: ``pmd-sleep-max``, which 3.1 calls ``pmd-maxsleep``.

    Newer versions read the old name too, and warn in their log.
    """
    return other_config.get("pmd-sleep-max", other_config.get("pmd-maxsleep"))

"""What differs between versions of OVS, from 3.1 to 4.0 (pure).

Only what the running OVS does not report is decided by its version. Its interface types are read, and the
output of its commands is recognised by its form: ``netplugin.pmd.read`` knows both forms of the counters.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import TypeAlias

Version: TypeAlias = tuple[int, int, int]

# -- The first version that has a feature.

#: OVS splits a large TCP segment where the NIC cannot; before, it drops it silently (NEWS, v3.3.0).
SPLITS_SEGMENTS = (3, 3)
#: The same for segments that go into a tunnel (NEWS, v3.5.0). Before 3.3 no tunnel accepted such a segment.
SPLITS_SEGMENTS_INTO_TUNNELS = (3, 5)
#: A ``vhost-server-path`` below /dev/vduse makes a VDUSE device (NEWS, v3.5.0).
HAS_VDUSE = (3, 5)
#: pmd-rxq-assign=group assigns queues by load without a fixed number of queues per thread (NEWS, v2.16.0).
ASSIGNS_BY_GROUP = (2, 16)
#: vswitchd probes only the devices of its ports, unless asked to (NEWS, v4.0.0).
_PROBES_NO_MORE = (4, 0)
#: "dpif-netdev: Fix dpif_netdev_flow_put": the first fixed release of each series, and of all others.
_MENDED = {(2, 17): 8, (3, 0): 5, (3, 1): 3}
_ALL_MENDED = (3, 2)


def parse_version(text: str | None) -> Version:
    """The numbers of ``ovs_version``; zeros (the oldest) if it is not reported."""
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", text or "")
    return (int(found[1]), int(found[2]), int(found[3] or 0)) if found else (0, 0, 0)


def keeps_old_actions(version: Version) -> bool:
    """Whether a datapath flow may keep its old actions when an OpenFlow table changes.

    An unknown version counts as affected.

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


# -- Which devices DPDK probes when vswitchd starts: other_config:dpdk-extra and dpdk-probe-at-init. ----


_DPDK_EXTRA = "dpdk-extra"
#: Words of ``dpdk-extra`` that stop OVS 4.0 from listing devices itself (dpdk_init__ in lib/dpdk.c). It
#: compares whole words: ``--allow=...`` does not count.
_STOPS_LISTING = frozenset(("-a", "--allow", "-b", "--block"))
_NO_PCI = "--no-pci"
#: Makes DPDK probe only this PCI address, which no device has. All versions start with it.
_NO_DEVICE = "-a 0000:00:00.0"


def dpdk_words(other_config: Mapping[str, str]) -> list[str]:
    """The words of ``dpdk-extra``."""
    return other_config.get(_DPDK_EXTRA, "").split()


def disables_pci(other_config: Mapping[str, str]) -> bool:
    """Whether ``dpdk-extra`` leaves OVS without any PCI device."""
    return _NO_PCI in dpdk_words(other_config)


def probes_all_devices(version: Version, other_config: Mapping[str, str]) -> bool:
    """Whether vswitchd probes all devices of vfio-pci when it starts, and not only those of its ports."""
    if disables_pci(other_config) or any(map(_allows, dpdk_words(other_config))):
        return False
    return version < _PROBES_NO_MORE or _probes_at_init(other_config)


def may_not_start(version: Version, other_config: Mapping[str, str]) -> bool:
    """Whether vswitchd fails to start with DPDK if DPDK lacks the driver of a bus.

    OVS 4.0 then names for each bus that it was built with a device that does not exist. DPDK refuses a name
    whose bus has no driver installed. Distributions package these drivers apart.
    """
    if version < _PROBES_NO_MORE or _probes_at_init(other_config):
        return False
    return _STOPS_LISTING.isdisjoint(dpdk_words(other_config))


def fix_of_start(version: Version, other_config: Mapping[str, str]) -> str | None:
    """What may have to be done before vswitchd starts with DPDK; None if nothing of the configuration."""
    asked = other_config.get("dpdk-init", "").lower() in ("true", "try")
    if not asked or not may_not_start(version, other_config):
        return None
    return f'if its log has "Cannot init EAL": {setting_dpdk_extra(with_no_device(other_config))}'


def with_no_device(other_config: Mapping[str, str]) -> str:
    """The same ``dpdk-extra`` with a PCI address that no device has."""
    return " ".join([*dpdk_words(other_config), _NO_DEVICE])


def with_pci(other_config: Mapping[str, str]) -> str:
    """The same ``dpdk-extra`` without ``--no-pci``, so that OVS probes the devices of its ports alone."""
    words = [word for word in dpdk_words(other_config) if word != _NO_PCI]
    return " ".join(words if any(map(_allows, words)) else [*words, _NO_DEVICE])


def setting_dpdk_extra(extra: str) -> str:
    """The command of a shell that sets ``dpdk-extra``; it takes effect when vswitchd starts."""
    return f"ovs-vsctl --no-wait set Open_vSwitch . other_config:dpdk-extra={shlex.quote(extra)}"


def _allows(word: str) -> bool:
    """Whether a word lists a device for DPDK; ``-w`` until DPDK 20.11."""
    return word in ("--allow", "--pci-whitelist") or word.startswith(("-a", "-w", "--allow="))


def _probes_at_init(other_config: Mapping[str, str]) -> bool:
    return other_config.get("dpdk-probe-at-init", "").lower() == "true"

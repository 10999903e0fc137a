"""Which devices DPDK probes when vswitchd starts, and whether it starts, by version and configuration."""

from __future__ import annotations

import pytest

from netplugin.host.ovs_versions import may_not_start, probes_all_devices, with_no_device, with_pci

OLD, NEWEST = (3, 5, 0), (4, 0, 0)


def extra(words: str, **others: str) -> dict[str, str]:
    return {"dpdk-extra": words, **others}


@pytest.mark.parametrize(
    ("words", "listed", "starts"),
    [
        ("", False, False),
        ("--in-memory", False, False),
        ("-a 0000:00:00.0", True, True),
        ("--allow 0000:00:00.0", True, True),
        # DPDK understands these; OVS, which looks for whole words, adds its own beside them.
        ("--allow=0000:00:00.0", True, False),
        ("-a0000:00:00.0", True, False),
        ("-b 0000:03:00.0", False, True),
        ("--no-pci", True, False),
    ],
)
def test_devices_that_dpdk_extra_lists(words: str, listed: bool, starts: bool) -> None:
    assert probes_all_devices(OLD, extra(words)) is not listed
    assert may_not_start(NEWEST, extra(words)) is not starts
    assert not probes_all_devices(NEWEST, extra(words)) and not may_not_start(OLD, extra(words))
    advised = with_no_device(extra(words))
    assert advised.split()[: len(words.split())] == words.split()
    assert not may_not_start(NEWEST, extra(advised)) and not probes_all_devices(OLD, extra(advised))


def test_an_ovs_that_is_configured_to_probe_at_its_start_does() -> None:
    asked = {"dpdk-probe-at-init": "True"}
    assert probes_all_devices(NEWEST, asked) and not may_not_start(NEWEST, asked)
    assert not probes_all_devices(NEWEST, extra("-a 0000:00:00.0", **asked))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("--no-pci", "-a 0000:00:00.0"),
        ("--no-pci --in-memory", "--in-memory -a 0000:00:00.0"),
        ("--no-pci -a 0000:03:00.0", "-a 0000:03:00.0"),
        ("", "-a 0000:00:00.0"),
    ],
)
def test_pci_comes_back_and_other_words_stay(before: str, after: str) -> None:
    assert with_pci(extra(before)) == after

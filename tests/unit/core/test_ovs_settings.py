"""The [ovs] options as a value: what is wrong is reported when the agent starts, naming the option."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from oslo_config import cfg

from drivers.ovs.findings import of_sockets
from drivers.ovs.sockets import NOTHING
from netplugin import options
from netplugin.host.names import MAX_SOCKET_PATH, vhost_socket
from netplugin.host.ovs import OvsSettings


def _read(tmp_path: Path, *lines: str) -> OvsSettings:
    file = tmp_path / "netplugin.conf"
    text = "\n".join(["[ovs]", "bridge_mappings = physnet1:br1,physnet2:br2", *lines])
    file.write_text(text + "\n")
    return OvsSettings.read(options.load([file]))


def test_several_devices_of_a_network_and_how_they_are_bonded(tmp_path: Path) -> None:
    settings = _read(
        tmp_path,
        "uplinks = physnet1:0000:03:00.0,physnet1:0000:03:00.1,physnet2:0000:04:00.0",
        "bonds = physnet1:lacp",
        "local_ip = FD00:0::1",
    )
    assert settings.uplinks["physnet1"] == ("0000:03:00.0", "0000:03:00.1")
    assert settings.bonds == {"physnet1": "lacp"}
    assert settings.local_ip == "fd00::1"
    assert _read(tmp_path).local_ip is None


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("bonds = physnet9:lacp", "[ovs] bonds: physnet9 is not in bridge_mappings"),
        ("uplinks = physnet9:0000:03:00.0", "[ovs] uplinks: physnet9"),
        ("uplinks = physnet1:0000:03:00.0,physnet2:0000:03:00.0", "is listed twice"),
        ("local_ip = 127.0.0.1", "[ovs] local_ip: 127.0.0.1"),
        ("local_ip = ff02::1", "[ovs] local_ip: ff02::1"),
    ],
)
def test_what_is_wrong_names_its_option(tmp_path: Path, line: str, words: str) -> None:
    with pytest.raises(ValueError) as refused:
        _read(tmp_path, line)
    assert words in str(refused.value)


@pytest.mark.parametrize("line", ["bonds = physnet1:balance-tcp", "local_ip = here"])
def test_a_value_that_cannot_be_names_its_option(tmp_path: Path, line: str) -> None:
    with pytest.raises((cfg.Error, ValueError)) as refused:
        _read(tmp_path, line)
    assert line.split()[0] in str(refused.value)


@pytest.mark.parametrize(
    ("directory", "has"), [("/" + "d" * 76, None), ("/" + "d" * 77, 78), ("/" + "ä" * 39, 79)]
)
def test_a_directory_with_no_room_for_sockets_is_reported(
    tmp_path: Path, directory: str, has: int | None
) -> None:
    """It is no reason not to start: ports that are there keep their paths."""
    settings = _read(tmp_path, f"vhost_socket_dir = {directory}")
    longest = len(os.fsencode(vhost_socket(settings.vhost_socket_dir, "any port")))
    assert (longest > MAX_SOCKET_PATH) == (has is not None)
    found = of_sockets(settings, {}, NOTHING)
    assert [(each.id, each.status) for each in found] == ([("vhost-socket-path", "fail")] if has else [])
    for each in found:
        assert f"has {has} bytes" in each.found and each.expected.startswith("77 bytes")
        assert "[ovs] vhost_socket_dir" in each.found

"""VPP's command line in place of its API: a command for each message, and answers of a real VPP."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from netplugin_zeroloss.vnf.contract import Attachment, VnfError, VnfPort
from netplugin_zeroloss.vnf.vpp import routing
from netplugin_zeroloss.vnf.vpp_cli import Cli, command_of

DATA = Path(__file__).resolve().parents[2] / "data/vpp-26.06"
PORTS = tuple(
    VnfPort(Attachment.VFIO, f"{n}", f"52:54:00:00:0a:0{n}", f"52:54:00:00:0b:0{n}") for n in range(2)
)


def test_routing_between_two_ports() -> None:
    commands = [command_of(message, fields, {3: "a", 4: "b"}) for message, fields in routing(PORTS, [3, 4])]
    assert commands == [
        "ip table add 1",
        "set interface ip table a 1",
        "set interface mtu packet 1500 a",
        "set interface state a up",
        "set interface ip address a 192.0.2.1/30",
        "set ip neighbor a 192.0.2.2 52:54:00:00:0b:00 static",
        "ip table add 2",
        "set interface ip table b 2",
        "set interface mtu packet 1500 b",
        "set interface state b up",
        "set interface ip address b 192.0.2.5/30",
        "set ip neighbor b 192.0.2.6 52:54:00:00:0b:01 static",
        "ip route add 0.0.0.0/0 table 1 via 192.0.2.6 b",
        "ip route add 0.0.0.0/0 table 2 via 192.0.2.2 a",
    ]


class Recorded:
    """Answers as a VPP did; to a command that changes something with ``refuses``."""

    def __init__(self, refuses: str = "") -> None:
        self.refuses = refuses
        self.changed: list[str] = []

    def __call__(self, command: Sequence[str]) -> str:
        vppctl, option, socket, *words = command
        assert (vppctl, option, socket) == ("/opt/vppctl", "-s", "/run/cli.sock")
        recording = DATA / f"{'-'.join(words)}.txt"
        if words[0] == "show":
            return recording.read_text()
        self.changed.append(" ".join(words))
        return self.refuses


def cli(vpp: Recorded) -> Cli:
    return Cli(vpp, "/opt/vppctl", "/run/cli.sock")


def test_what_the_vnf_asks_for_is_read_from_real_output() -> None:
    asked = cli(Recorded())
    assert asked.call("show_version").version == "26.06-release"
    found = [(i.interface_name, i.sw_if_index, i.flags) for i in asked.dump("sw_interface_dump")]
    assert found == [("host-va", 1, 2), ("local0", 0, 0)]
    (placed,) = asked.dump("sw_interface_rx_placement_dump", sw_if_index=1)
    assert placed.queue_id == 0
    assert asked.dump("sw_interface_rx_placement_dump", sw_if_index=0) == []
    assert "ip4-lookup" in asked.call("cli_inband", cmd="show runtime").reply


def test_the_refusal_of_vpp_is_reported_as_printed() -> None:
    vpp = Recorded("set interface mac address: not supported")
    with pytest.raises(VnfError, match=r"VPP refuses `set interface mac address host-va 52:.* not supported"):
        cli(vpp).call("sw_interface_set_mac_address", sw_if_index=1, mac_address="52:54:00:00:0a:00")
    quiet = Recorded()
    cli(quiet).call("sw_interface_set_flags", sw_if_index=1, flags=0)
    assert quiet.changed == ["set interface state host-va down"]


def test_a_message_without_a_command() -> None:
    with pytest.raises(VnfError, match="nothing for create_vhost_user_if_v2"):
        cli(Recorded()).call("create_vhost_user_if_v2", is_server=True)

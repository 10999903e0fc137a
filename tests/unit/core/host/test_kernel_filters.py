"""Lists of a kernel that does not know their filter, and of devices that go while they are listed."""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Sequence

import pytest

from netplugin.api.errors import HostError
from netplugin.host.fdb import Fdb
from netplugin.host.link_values import Link
from netplugin.host.links import Links
from netplugin.host.netlink import attribute
from tests.unit.kernel_answers import answer_by

MAC = bytes.fromhex("525400000001")
_NOARP, _STICKY, _REACHABLE = 0x40, 0x40, 0x02
_GONE = 99999
_NEWNEIGH, _DELNEIGH = 28, 29


def link(index: int, name: str, kind: str = "", *, master: int = 0) -> bytes:
    info = attribute(18, attribute(1, kind.encode() + b"\0")) if kind else b""
    on = attribute(10, struct.pack("=I", master)) if master else b""
    return struct.pack("=BxHiII", 0, 1, index, 1, 0) + attribute(3, name.encode() + b"\0") + on + info


def entry(index: int, state: int, flags: int = 0) -> bytes:
    head = struct.pack("=BxxxiHBB", socket.AF_BRIDGE, index, state, flags, 0)
    return head + attribute(2, MAC) + attribute(1, socket.inet_aton("10.0.0.1"))


def lists(monkeypatch: pytest.MonkeyPatch, found: Sequence[bytes]) -> None:
    answer_by(monkeypatch, lambda *_: found)


def test_devices_of_other_kinds_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    lists(monkeypatch, [link(1, "lo"), link(2, "br0", "bridge")])
    assert Links().of_kind("vxlan") == [], "it knows no such kind, or there is none"
    lists(monkeypatch, [link(2, "br0", "bridge")])
    assert [each.name for each in Links().of_kind("bridge")] == ["br0"]


def test_members_of_other_bonds_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    lists(monkeypatch, [link(3, "eth0", master=9), link(4, "eth1", master=8), link(5, "eth2")])
    assert [each.name for each in Links().bond_members(Link(9, "bond0"))] == ["eth0"]


def test_entries_of_other_ports_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    lists(monkeypatch, [entry(4, _NOARP, _STICKY), entry(4, _REACHABLE)])
    assert Fdb().fixed(3) == Fdb().peers(3) == frozenset() and not Fdb().learned(3)
    assert Fdb().fixed(4) == {"52:54:00:00:00:01"} and Fdb().learned(4)
    assert Fdb().peers(4) == frozenset(), "no entry is for all destinations"


def test_a_peer_that_is_there_is_added_and_one_that_is_gone_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(kind: int, body: bytes, flags: int) -> Sequence[bytes]:
        code = {_NEWNEIGH: errno.EEXIST, _DELNEIGH: errno.ENOENT}.get(kind)
        if code is not None:
            raise OSError(code, "")
        return []

    answer_by(monkeypatch, answer)
    Fdb().add_peer(3, "10.0.0.1")
    Fdb().remove_peer(3, "10.0.0.1")
    with pytest.raises(HostError):
        Fdb().fix(3, "52:54:00:00:00:01")


def test_a_bridge_that_has_gone_meanwhile_has_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    lists(monkeypatch, [link(3, "tap0", master=_GONE)])
    assert [each.master for each in Links().find(lambda *_: True)] == [f"device {_GONE}"]

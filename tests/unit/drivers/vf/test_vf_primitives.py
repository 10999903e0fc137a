"""VFs by netlink and sysfs: what is read from bytes, what is written, and what a refusal becomes."""

from __future__ import annotations

import errno
import os
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drivers.vf.pool import pci_address
from netplugin.api.errors import HostError, NetpluginError, OperationTimeout, Unsupported
from netplugin.host import netlink, vfs
from netplugin.host.netlink import attribute
from netplugin.host.vf_messages import GROUPS, VfAttributes, differing, parse_link
from netplugin.host.vfs import VfBusy, VfInvalid, VfRefuses, Vfs, _error
from tests.unit.drivers.vf.trees import Nic, build
from tests.unit.kernel_answers import answer_by, message

FULL = VfAttributes(
    "52:54:00:00:00:07",
    100,
    5,
    True,
    True,
    "enable",
    100,
    200,
    vlan_stacked=True,
)


def vf_info(number: int, want: VfAttributes, *, switches: bool = True, statistics: bool = False) -> bytes:
    """One VF as the kernel reports it (``rtnl_fill_vfinfo`` in net/core/rtnetlink.c)."""
    mac = bytes.fromhex(want.mac.replace(":", ""))
    unknown = 0xFFFFFFFF
    protocol = struct.pack(">H2x", 0x88A8 if want.vlan_stacked else 0x8100)
    return attribute(
        1,
        attribute(1, struct.pack("=I32s", number, mac)),
        attribute(13, bytes(32)),
        attribute(12, attribute(1, struct.pack("=III", number, want.vlan, want.vlan_qos) + protocol)),
        *(
            [attribute(8, *(attribute(kind, bytes(8)) for kind in (0, 1, 2, 3, 4, 5, 7, 8)))]
            if statistics
            else []
        ),
        attribute(2, struct.pack("=III", number, want.vlan, want.vlan_qos)),
        attribute(6, struct.pack("=III", number, want.min_mbps, want.max_mbps)),
        attribute(4, struct.pack("=II", number, bool(want.spoofchk) if switches else unknown)),
        attribute(5, struct.pack("=II", number, ["auto", "enable"].index(want.link_state))),
        attribute(9, struct.pack("=II", number, bool(want.trusted) if switches else unknown)),
    )


def link_of(index: int, name: str, *more: bytes) -> bytes:
    """A link of a PCI device as the kernel reports it, with further attributes."""
    of_pci = attribute(56, b"0000:03:00.0\0") + attribute(57, b"pci\0")
    return (
        struct.pack("=BxHiII", 0, 1, index, 1, 0)
        + attribute(3, f"{name}\0".encode())
        + b"".join(more)
        + of_pci
    )


def vfs_of(*vfs: bytes) -> dict[int, VfAttributes]:
    """The VFs of a link with these."""
    found = parse_link(message(16, link_of(7, "eth0", attribute(22, *vfs))))
    return dict(found.vfs)


def plain(**fields: Any) -> VfAttributes:
    """What has every switch, and all of them off."""
    return VfAttributes(**{"spoofchk": False, "trusted": False, **fields})


def test_attributes_are_read_by_number() -> None:
    found = vfs_of(vf_info(0, VfAttributes(), switches=False), vf_info(130, FULL))
    assert found == {0: VfAttributes(), 130: FULL}


@pytest.mark.parametrize("count", [221, 222, 256])
def test_more_vfs_than_the_length_of_their_list_can_say(count: int) -> None:
    """The kernel sends them whole, and the low 16 bits of the length (``nla_nest_end``)."""
    vfs = b"".join(vf_info(n, plain(vlan=n), statistics=True) for n in range(count) if n != 7)
    before = attribute(3, b"eth0\0") + attribute(21, struct.pack("=I", count))
    listed = struct.pack("=HH", (4 + len(vfs)) & 0xFFFF, 22) + vfs
    after = attribute(43, b"") + attribute(54, bytes(range(6)))
    link = parse_link(message(16, struct.pack("=BxHiII", 0, 1, 7, 1, 0) + before + listed + after))
    assert link.permanent_mac == "00:01:02:03:04:05", "what follows the list is read too"
    assert link.vfs == {n: plain(vlan=n) for n in range(count) if n != 7}, "7 is left out"


def test_a_nic_whose_vfs_fit_into_no_message_is_read_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(kind: int, body: bytes, flags: int) -> list[bytes]:
        if dict(netlink.attributes(body, 16))[29][0] & 1:
            raise OSError(errno.EMSGSIZE, "Message too long")
        return [link_of(3, "ib0")]

    answer_by(monkeypatch, answer)
    link = Vfs().link(3)
    assert link is not None and (link.name, link.vfs) == ("ib0", {})


def test_a_link_is_read() -> None:
    header = struct.pack("=BxHiII", 0, 1, 7, 1, 0)
    name = attribute(3, b"eth0\0") + attribute(4, struct.pack("=I", 9000)) + attribute(33, b"\1")
    link = parse_link(message(16, header + name + attribute(54, bytes(range(6)))))
    assert (link.index, link.name, link.mtu) == (7, "eth0", 9000)
    assert (link.up, link.carrier) == (True, True)
    assert link.permanent_mac == "00:01:02:03:04:05"


def test_one_link_is_requested_without_a_dump(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, bytes, int]] = []

    def answer(kind: int, body: bytes, flags: int) -> list[bytes]:
        asked.append((kind, body, flags))
        return [link_of(7, "eth0", attribute(22, vf_info(3, FULL)))]

    answer_by(monkeypatch, answer)
    link = Vfs().link(7)
    assert link is not None and (link.name, link.vfs) == ("eth0", {3: FULL})
    [(kind, body, flags)] = asked
    assert (kind, flags) == (18, 5), "RTM_GETLINK, and no dump"
    assert struct.unpack_from("=BxHiII", body)[2] == 7
    assert struct.unpack("=I", dict(netlink.attributes(body, 16))[29])[0] & 1, "with its VFs"


def test_a_link_that_is_no_more_is_none_and_another_refusal_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def answer(kind: int, body: bytes, flags: int) -> list[bytes]:
        raise OSError(code, os.strerror(code))

    answer_by(monkeypatch, answer)
    code = errno.ENODEV
    assert Vfs().link(7) is None
    code = errno.EPERM
    with pytest.raises(HostError):
        Vfs().link(7)


def test_only_what_differs_is_to_write() -> None:
    assert differing(VfAttributes(), plain()) == ()
    assert differing(FULL, VfAttributes()) == tuple(GROUPS)
    for field in ({"vlan_qos": 0}, {"vlan_stacked": False}):
        assert differing(FULL, replace(FULL, **field)) == ("vlan",)


@pytest.mark.parametrize("group", GROUPS)
def test_what_is_written_is_what_is_read(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []
    answer_by(monkeypatch, lambda kind, body, flags: sent.append(body) or [])
    want = replace(FULL, vlan_stacked=False)
    Vfs().set(7, 3, group, want)
    [body] = sent
    found = dict(netlink.attributes(body, 16))
    assert struct.unpack_from("=BxHiII", body)[2] == 7
    defaults = dict(netlink.attributes(vf_info(3, plain())[4:]))
    defaults |= dict(netlink.attributes(dict(netlink.attributes(found[22]))[1]))
    reported = vfs_of(attribute(1, *(attribute(kind, value) for kind, value in defaults.items())))[3]
    for name in GROUPS[group]:
        assert getattr(reported, name) == getattr(want, name)


def test_a_stacked_vlan_is_written_with_its_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    """struct ifla_vf_vlan_info in IFLA_VF_VLAN_LIST (``do_setvfinfo`` in net/core/rtnetlink.c)."""
    sent: list[bytes] = []
    answer_by(monkeypatch, lambda kind, body, flags: sent.append(body) or [])
    Vfs().set(7, 3, "vlan", FULL)
    vf = dict(netlink.attributes(dict(netlink.attributes(sent[0], 16))[22]))[1]
    [(kind, listed)] = netlink.attributes(vf)
    assert kind == 12 and list(netlink.attributes(listed)) == [
        (1, struct.pack("=III", 3, 100, 5) + b"\x88\xa8\0\0")
    ]


@pytest.mark.parametrize(
    ("group", "refusal", "error"),
    [
        ("link_state", OSError(errno.EOPNOTSUPP, "Operation not supported"), Unsupported),
        ("vlan", OSError(524, "Unknown error 524"), Unsupported),
        ("mac", OSError(errno.EAGAIN, "Resource temporarily unavailable"), VfBusy),
        ("mac", OSError(errno.EBUSY, "Device or resource busy"), VfBusy),
        ("rate", OSError(errno.EINVAL, "Invalid argument"), VfInvalid),
        ("vlan", OSError(errno.EPROTONOSUPPORT, "Protocol not supported"), Unsupported),
        ("mac", OSError(errno.EINVAL, "Invalid argument"), VfInvalid),
        ("vlan", OSError(errno.EIO, "Input/output error"), VfRefuses),
        ("mac", OSError(errno.EPERM, "Operation not permitted"), HostError),
        ("mac", OSError(errno.ENODEV, "No such device"), HostError),
        ("mac", TimeoutError(), OperationTimeout),
    ],
)
def test_a_refusal_is_the_nics_the_vfs_or_ours(
    group: str, refusal: OSError, error: type[NetpluginError], monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(*_: object) -> list[bytes]:
        raise refusal

    answer_by(monkeypatch, answer)
    monkeypatch.setattr(vfs, "_administers_networks", lambda: False)
    with pytest.raises(NetpluginError) as raised:
        Vfs().set(7, 3, group, FULL)
    assert type(raised.value) is error
    assert group in raised.value.detail


def test_what_the_nic_forbids_who_administers_networks_is_unsupported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``mlx5_esw_allowed``: the host does not manage the switch of its NIC."""
    monkeypatch.setattr(vfs, "_administers_networks", lambda: True)
    assert type(_error("set-vf", "", errno.EPERM, "spoofchk")) is Unsupported
    assert type(_error("bind-vf", "", errno.EPERM, "driver")) is HostError
    assert type(_error("bind-vf", "", errno.EOPNOTSUPP, "driver")) is VfRefuses, "of no setting"


@pytest.mark.parametrize(("mask", "has"), [("000001ffffffffff", True), ("00000000a80425fb", False)])
def test_whether_this_process_administers_networks(
    mask: str, has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CapEff of proc_pid_status(5): of root, and of root in a container of Docker's."""
    status = f"Name:\tpython\nCapPrm:\t000001ffffffffff\nCapEff:\t{mask}\n"
    monkeypatch.setattr(vfs, "read_text", lambda path: status)
    assert vfs._administers_networks() is has


# -- sysfs ---------------------------------------------------------------------------------------


def test_drivers_are_written_where_the_kernel_reads_them(tmp_path: Path) -> None:
    build(tmp_path, Nic())
    device = tmp_path / "bus/pci/devices/0000:03:10.1"
    vfs = Vfs(tmp_path)
    vfs.override("0000:03:10.1", "vfio-pci")
    assert (device / "driver_override").read_text() == "vfio-pci"
    vfs.unbind("0000:03:10.1")
    assert (tmp_path / "bus/pci/drivers/igbvf/unbind").read_text() == "0000:03:10.1"
    vfs.reset("0000:03:10.1")
    assert (device / "reset").read_text() == "1"
    vfs.probe("0000:03:10.1")
    assert (tmp_path / "bus/pci/drivers_probe").read_text() == "0000:03:10.1"
    vfs.override("0000:03:10.1", None)
    assert (device / "driver_override").read_text() == "\n"


def test_what_is_not_there_needs_no_unbinding_and_no_reset(tmp_path: Path) -> None:
    build(tmp_path, Nic(vf_driver=None))
    (tmp_path / "bus/pci/devices/0000:03:10.1/reset").unlink()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    Vfs(tmp_path).unbind("0000:03:10.1")
    Vfs(tmp_path).reset("0000:03:10.1")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_device_that_a_vm_has_open_is_never_unbound(tmp_path: Path) -> None:
    """The kernel would wait for the VM, and we with it."""
    build(tmp_path, Nic(vf_driver="vfio-pci"))
    with pytest.raises(HostError, match="in use"):
        Vfs(tmp_path).unbind("0000:03:10.1")
    assert not (tmp_path / "bus/pci/drivers/vfio-pci/unbind").exists()


def test_a_vf_that_has_gone_is_not_called_unfit(tmp_path: Path) -> None:
    build(tmp_path, Nic())
    with pytest.raises(HostError) as raised:
        Vfs(tmp_path).override("0000:99:10.1", "vfio-pci")
    assert type(raised.value) is HostError
    assert os.strerror(errno.ENOENT) in raised.value.detail


@pytest.mark.parametrize(
    ("message", "address"),
    [
        (b"bind@/devices/x\0ACTION=bind\0SUBSYSTEM=pci\0PCI_SLOT_NAME=0000:03:10.1\0", "0000:03:10.1"),
        (b"add@/devices/x\0ACTION=add\0SUBSYSTEM=net\0INTERFACE=eth0\0", None),
        (b"libudev\0\xfe\xed\xca\xfe", None),
        (b"", None),
    ],
)
def test_events_of_pci_devices(message: bytes, address: str | None) -> None:
    assert pci_address(message) == address

"""A device whose host sees one VLAN of the wire alone, as by a VLAN device: not every kernel has these.

Two programs of the kernel's traffic control push and pop the tag (``bpf_skb_vlan_push`` in bpf-helpers(7)).
"""

from __future__ import annotations

import ctypes
import os
import struct

from pyroute2 import NetNS

from tests.lab.processes import LabError

_BPF, _PROG_LOAD, _SCHED_CLS = 321, 5, 3  # bpf(2) on x86-64
_MOV, _CALL, _EXIT = 0xB7, 0x85, 0x95
_PUSH, _POP = 18, 19
_PROTOCOL = int.from_bytes(b"\x81\x00", "little")
_EGRESS, _INGRESS = "ffff:fff3", "ffff:fff2"


def carry_vlan(netns: str, device: str, vlan_id: int) -> None:
    """Tag what leaves by the device with this VLAN, and untag what comes in."""
    with NetNS(netns) as ipr:
        [index] = ipr.link_lookup(ifname=device)
        ipr.tc("add", "clsact", index)
        programs = {_EGRESS: _pushing(vlan_id), _INGRESS: [(_CALL, 0, _POP), *_PASS]}
        for parent, program in programs.items():
            loaded = _load(program)
            ipr.tc(
                *("add-filter", "bpf", index, ":1"),
                fd=loaded,
                name="vlan",
                parent=parent,
                classid=1,
                direct_action=True,
            )
            os.close(loaded)


_PASS = [(_MOV, 0, 0), (_EXIT, 0, 0)]  # TC_ACT_OK


def _pushing(vlan_id: int) -> list[tuple[int, int, int]]:
    """The frame is in register 1 from the beginning."""
    return [(_MOV, 2, _PROTOCOL), (_MOV, 3, vlan_id), (_CALL, 0, _PUSH), *_PASS]


def _load(program: list[tuple[int, int, int]]) -> int:
    """A descriptor of the program; each instruction is its code, a register and a number."""
    code = b"".join(struct.pack("<BBhi", what, register, 0, number) for what, register, number in program)
    instructions, licence = ctypes.create_string_buffer(code), ctypes.create_string_buffer(b"GPL")
    attributes = struct.pack(
        "<IIQQ", _SCHED_CLS, len(program), ctypes.addressof(instructions), ctypes.addressof(licence)
    ).ljust(120, b"\0")
    libc = ctypes.CDLL(None, use_errno=True)
    loaded = libc.syscall(_BPF, _PROG_LOAD, ctypes.create_string_buffer(attributes), len(attributes))
    if loaded < 0:
        raise LabError(f"bpf: {os.strerror(ctypes.get_errno())}")
    return int(loaded)

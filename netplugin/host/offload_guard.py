"""The guard of offloads: an eBPF program in tc that drops frames of which the kernel would yet change what
filters judge.

A VM's virtio header may ask the host to complete a checksum (VIRTIO_NET_HDR_F_NEEDS_CSUM) or to segment
the frame (GSO). The kernel does both behind all filters. The header is gone by then. Its requests are
in the socket buffer, which neither classic BPF nor nftables can read. This program can.

**Checksums.** The kernel writes two bytes, of the VM's choice, at a place of its choice
(``skb_checksum_help`` in net/core/dev.c). The place may be where TCP and UDP have their checksum, or
anywhere behind that; with other protocols over IP, behind their IP headers, where tunnels carry such
packets; with other frames, behind the EtherType. ARP, RARP and ICMPv6 have none to complete. So filters
must judge nothing behind these places.

**Segmentation** changes lengths, numbers and checksums of the headers that the kernel itself finds, which
no filter judges. There are three exceptions, all of UDP:

- a part of less than 8 bytes (``udp4_ufo_fragment`` in net/ipv4/udp_offload.c) would be a fragment
  without the ports;
- IPv6 extension headers that are judged in the whole packet could be parted from what follows;
- since Linux 6.17 the header may declare that a tunnel begins before the real UDP header, so that the
  packet in it begins within (``virtio_net_hdr_tnl_to_skb`` in include/linux/virtio_net.h). Its length would
  be written over the UDP port.

A frame to be segmented whose checksum is complete is dropped: drivers must not send it (virtio 1.2,
section 5.1.6.2.1).

The fields of the socket buffer are at other places in each kernel, which its BTF tells.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from netplugin.host import btf

# include/uapi/linux: bpf.h, pkt_cls.h; TC_ACT_UNSPEC continues with the next filter.
_PROG_LOAD, _SCHED_CLS = 5, 3
_GO_ON, _SHOT = -1, 2
_LOAD_BYTES, _READ_KERNEL = 26, 113
_MOVE, _MOVE_REGISTER, _ADD, _ADD_REGISTER, _SUBTRACT_REGISTER = 0xB7, 0xBF, 0x07, 0x0F, 0x1F
_AND, _SHIFT, _SHIFT_RIGHT = 0x57, 0x67, 0x77
_EQUAL, _UNEQUAL, _LESS, _LESS_REGISTER = 0x15, 0x55, 0xC5, 0xCD
_GO, _CALL, _EXIT = 0x05, 0x85, 0x95
_LOAD_BYTE, _LOAD_HALF, _LOAD_WORD, _LOAD_LONG, _STORE_LONG = 0x71, 0x69, 0x61, 0x79, 0x7B
_TO_BIG_ENDIAN = 0xDC
_SEGMENT = 176  # gso_size in struct __sk_buff
_STACK = 10
_INSTRUCTION = struct.Struct("=BBhi")
_SYSCALL = {"x86_64": 321, "aarch64": 280}
#: The kernel lets no other program read its memory.
_LICENCE = b"Dual BSD/GPL"

_CHECKSUM_PARTIAL = 3
_ETHERNET, _TYPE = 14, 12
#: From the EtherType to what IPv4 or IPv6 have of the next header.
_HEAD = 12
_ARP, _RARP, _IPV4, _IPV6 = 0x0806, 0x8035, 0x0800, 0x86DD
_TCP, _UDP, _ICMPV6 = 6, 17, 58
# IPv6 extension headers (RFC 8200), with those of another layout: fragment, authentication (RFC 4302).
_OPTIONS, _FRAGMENT, _AUTHENTICATION = (0, 43, 60), 44, 51
_HEADERS = 8  # as many as the guard follows

# Registers that calls keep: the frame, its EtherType or a protocol, and bytes from the start of the frame:
# the first at which a checksum may be, and where the transport header is by the VM's word.
_FRAME, _WHAT, _PLACE, _TRANSPORT = 6, 7, 8, 9
# On the stack: where the checksum is to be, what is loaded of the frame and of its socket buffer.
_CHECKSUM, _LOADED, _BUFFER = -8, -24, -256


#: The fields of ``struct sk_buff`` that the guard reads; ``ip_summed`` has two bits, the others two bytes.
_FIELDS = ("ip_summed", "csum_start", "csum_offset", "transport_header", "mac_header")


@dataclass
class _Assembler:
    """Assembles a program with labels. A register is 0 to 9; calls change 0 to 5."""

    _code: list[tuple[int, int, int, str | int, int]] = field(default_factory=list)
    _labels: dict[str, int] = field(default_factory=dict)

    def add(self, code: int, to: int = 0, value: int = 0, *, source: int = 0, offset: int = 0) -> None:
        self._code.append((code, to, source, offset, value))

    def jump(self, code: int, label: str, register: int = 0, value: int = 0, *, other: int = 0) -> None:
        self._code.append((code, register, other, label, value))

    def label(self, name: str) -> None:
        self._labels[name] = len(self._code)

    def load(self, count: int, *, at: int | None = None) -> None:
        """Load bytes of the frame from ``at`` (None: from the place); drop a frame that is shorter."""
        self.add(_MOVE_REGISTER, 1, source=_FRAME)
        if at is None:
            self.add(_MOVE_REGISTER, 2, source=_PLACE)
        else:
            self.add(_MOVE, 2, at)
        self.add(_MOVE_REGISTER, 3, source=_STACK)
        self.add(_ADD, 3, _LOADED)
        self.add(_MOVE, 4, count)
        self._call(_LOAD_BYTES)

    def read(self, start: int, end: int) -> None:
        """Load these bytes of the socket buffer."""
        self.add(_MOVE_REGISTER, 1, source=_STACK)
        self.add(_ADD, 1, _BUFFER)
        self.add(_MOVE, 2, end - start)
        self.add(_MOVE_REGISTER, 3, source=_FRAME)
        self.add(_ADD, 3, start)
        self._call(_READ_KERNEL)

    def _call(self, function: int) -> None:
        self.add(_CALL, value=function)
        self.jump(_UNEQUAL, "drop", 0, 0)

    def byte(self, to: int, number: int = 0) -> None:
        """Set a register to a byte that was loaded."""
        self.add(_LOAD_BYTE, to, source=_STACK, offset=_LOADED + number)

    def number(self, to: int, number: int = 0) -> None:
        """Set a register to two bytes that were loaded."""
        self.add(_LOAD_HALF, to, source=_STACK, offset=_LOADED + number)
        self.add(_TO_BIG_ENDIAN, to, 16)

    def go_if_segmented(self, label: str) -> None:
        self.add(_LOAD_WORD, 1, source=_FRAME, offset=_SEGMENT)
        self.jump(_UNEQUAL, label, 1, 0)

    def code(self) -> bytes:
        code = bytearray()
        for at, (operation, to, source, offset, value) in enumerate(self._code):
            jump = self._labels[offset] - at - 1 if isinstance(offset, str) else offset
            code += _INSTRUCTION.pack(operation, source << 4 | to, jump, value)
        return bytes(code)


def _assembled(layout: Mapping[str, int]) -> bytes:
    """The program for a kernel that has ``_FIELDS`` at these places, in bits."""
    code = _Assembler()
    code.add(_MOVE_REGISTER, _FRAME, source=1)
    _requests(code, layout)
    code.load(_HEAD, at=_TYPE)
    code.number(_WHAT)
    code.add(_MOVE, _PLACE, _ETHERNET)
    code.jump(_EQUAL, "ipv4", _WHAT, _IPV4)
    code.jump(_EQUAL, "ipv6", _WHAT, _IPV6)
    code.jump(_EQUAL, "drop", _WHAT, _ARP)
    code.jump(_EQUAL, "drop", _WHAT, _RARP)
    code.jump(_GO, "check")
    _ipv4(code)
    _ipv6(code)
    code.label("upper")
    code.jump(_LESS_REGISTER, "drop", _TRANSPORT, other=_PLACE)
    code.jump(_EQUAL, "drop", _WHAT, _ICMPV6)
    code.jump(_EQUAL, "udp", _WHAT, _UDP)
    code.jump(_UNEQUAL, "check", _WHAT, _TCP)
    code.add(_ADD, _PLACE, 16)
    code.jump(_GO, "check")
    code.label("udp")
    code.add(_ADD, _PLACE, 6)
    code.add(_LOAD_WORD, 1, source=_FRAME, offset=_SEGMENT)
    code.jump(_EQUAL, "check", 1, 0)
    code.jump(_LESS, "drop", 1, 8)
    code.label("check")
    code.add(_LOAD_LONG, 1, source=_STACK, offset=_CHECKSUM)
    code.jump(_LESS_REGISTER, "drop", 1, other=_PLACE)
    code.label("pass")
    code.add(_MOVE, 0, _GO_ON)
    code.add(_EXIT)
    code.label("drop")
    code.add(_MOVE, 0, _SHOT)
    code.add(_EXIT)
    return code.code()


def _requests(code: _Assembler, layout: Mapping[str, int]) -> None:
    """Pass a frame of which nothing is to be changed; of others keep where."""
    first, last = (limit(layout.values()) // 8 for limit in (min, max))
    if last + 2 - first > _LOADED - _BUFFER:
        raise ValueError("the fields of a socket buffer are too far apart")
    code.read(first, last + 2)
    at = {name: _BUFFER - first + layout[name] // 8 for name in _FIELDS}
    code.add(_LOAD_BYTE, 1, source=_STACK, offset=at["ip_summed"])
    code.add(_SHIFT_RIGHT, 1, layout["ip_summed"] % 8)
    code.add(_AND, 1, 3)
    code.jump(_EQUAL, "incomplete", 1, _CHECKSUM_PARTIAL)
    code.go_if_segmented("drop")
    code.jump(_GO, "pass")
    code.label("incomplete")
    code.add(_LOAD_HALF, 1, source=_STACK, offset=at["mac_header"])
    code.add(_LOAD_HALF, _TRANSPORT, source=_STACK, offset=at["transport_header"])
    code.add(_SUBTRACT_REGISTER, _TRANSPORT, source=1)
    code.add(_LOAD_HALF, 2, source=_STACK, offset=at["csum_start"])
    code.add(_SUBTRACT_REGISTER, 2, source=1)
    code.add(_LOAD_HALF, 1, source=_STACK, offset=at["csum_offset"])
    code.add(_ADD_REGISTER, 2, source=1)
    code.add(_STORE_LONG, _STACK, source=2, offset=_CHECKSUM)


def _ipv4(code: _Assembler) -> None:
    code.label("ipv4")
    code.byte(1, 2)
    code.add(_AND, 1, 0x0F)
    code.add(_SHIFT, 1, 2)
    code.add(_ADD_REGISTER, _PLACE, source=1)
    code.byte(_WHAT, 11)
    code.number(1, 8)
    code.add(_AND, 1, 0x1FFF)
    code.jump(_EQUAL, "upper", 1, 0)
    code.jump(_GO, "check")  # a later fragment has no header of what is above


def _ipv6(code: _Assembler) -> None:
    code.label("ipv6")
    code.byte(_WHAT, 8)
    code.add(_ADD, _PLACE, 40)
    for header in (_TCP, _UDP):
        code.jump(_EQUAL, "upper", _WHAT, header)
    for number in range(_HEADERS):
        for header in _OPTIONS:
            code.jump(_EQUAL, f"options {number}", _WHAT, header)
        code.jump(_EQUAL, f"authentication {number}", _WHAT, _AUTHENTICATION)
        code.jump(_EQUAL, "fragment", _WHAT, _FRAGMENT)
        code.jump(_GO, "extended")
        for name, shift, more in (("options", 3, 1), ("authentication", 2, 2)):
            code.label(f"{name} {number}")
            code.load(2)
            code.byte(_WHAT)
            code.byte(1, 1)
            code.add(_ADD, 1, more)
            code.add(_SHIFT, 1, shift)
            code.add(_ADD_REGISTER, _PLACE, source=1)
            code.jump(_GO, f"header {number + 1}")
        code.label(f"header {number + 1}")
    code.jump(_GO, "drop")
    code.label("fragment")
    code.load(8)
    code.byte(_WHAT)
    code.add(_ADD, _PLACE, 8)
    code.number(1, 2)
    code.add(_AND, 1, 0xFFF8)
    code.jump(_UNEQUAL, "check", 1, 0)
    code.label("extended")
    code.jump(_UNEQUAL, "upper", _WHAT, _UDP)
    code.go_if_segmented("drop")


#: The name that the filter has in tc, by which the program is known again: it tells the version.
NAME = f"netplugin-offloads-{hashlib.sha256(_assembled(dict.fromkeys(_FIELDS, 0))).hexdigest()[:12]}"


@cache
def program() -> int:
    """Load the program, once in this process, and return its descriptor.

    Raises: OSError; ValueError or KeyError if the kernel's BTF does not describe the socket buffer.
    """
    found = btf.fields("sk_buff", btf.VMLINUX.read_bytes())
    instructions = _assembled({name: found[name] for name in _FIELDS})
    code, licence = ctypes.create_string_buffer(instructions), ctypes.create_string_buffer(_LICENCE)
    count = len(instructions) // _INSTRUCTION.size
    request = struct.pack("=IIQQ", _SCHED_CLS, count, ctypes.addressof(code), ctypes.addressof(licence))
    attributes = ctypes.create_string_buffer(request.ljust(120, b"\0"), 120)
    number = _SYSCALL.get(platform.machine(), _SYSCALL["aarch64"])
    loaded = ctypes.CDLL(None, use_errno=True).syscall(number, _PROG_LOAD, attributes, len(attributes))
    if loaded < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(loaded)

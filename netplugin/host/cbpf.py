"""Classic BPF programs as values that can be compared with those that the kernel reports.

Classic instead of extended BPF: the kernel verifies it without a log buffer, it needs only
CAP_NET_ADMIN and no file descriptor to be kept open, and the instructions can be read back from the
filter (``cls_bpf_dump_bpf_info`` in net/sched/cls_bpf.c).

A load beyond the end of the frame ends the program with the value 0. In a direct-action filter of
tc this means "pass", so a program must check the length first (``Assembler.need``).
"""

from __future__ import annotations

import ctypes
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field

# include/uapi/linux: bpf_common.h, filter.h
_LD, _LDX, _ST, _STX, _ALU, _JMP, _RET, _MISC = range(8)
_W, _H, _B = 0x00, 0x08, 0x10
_IMM, _ABS, _IND, _MEM, _LEN, _MSH = 0x00, 0x20, 0x40, 0x60, 0x80, 0xA0
_ADD, _AND, _LSH = 0x00, 0x50, 0x60
_JA, _JEQ, _JGE = 0x00, 0x10, 0x30
_X, _TAX, _TXA = 0x08, 0x00, 0x80
_SIZES = {4: _W, 2: _H, 1: _B}
_VLAN_TAG_PRESENT = 0xFFFFF000 + 48  # SKF_AD_OFF + SKF_AD_VLAN_TAG_PRESENT
_INSTRUCTION = struct.Struct("=HBBI")
_MOST = 4096  # BPF_MAXINSNS
_SO_ATTACH_FILTER = 26  # include/uapi/asm-generic/socket.h


@dataclass(frozen=True)
class BpfProgram:
    """The instructions in the kernel's format (``struct sock_filter``)."""

    code: bytes

    @property
    def length(self) -> int:
        return len(self.code) // _INSTRUCTION.size

    def attach(self, to: socket.socket) -> None:
        """Let a socket take only the messages for which the program does not end with 0.

        Raises: OSError if the kernel refuses it.
        """
        code = ctypes.create_string_buffer(self.code)
        to.setsockopt(
            socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("@HP", self.length, ctypes.addressof(code))
        )


@dataclass
class Assembler:
    """Assembles a program with labels. ``A`` is the accumulator, ``X`` the index register.

    A test is followed by a 32-bit jump, because the offsets of a test reach only 255 instructions.
    """

    _code: list[tuple[int, int, int, int | str]] = field(default_factory=list)
    _labels: dict[str, int] = field(default_factory=dict)

    # -- loads and arithmetic ----------------------------------------------------------------------

    def load(self, offset: int, size: int, *, behind_x: bool = False) -> None:
        """A = ``size`` bytes of the frame at ``offset`` (relative to X if ``behind_x``)."""
        self._add(_LD | _SIZES[size] | (_IND if behind_x else _ABS), offset)

    def load_tagged(self) -> None:
        """A = whether the frame has a VLAN tag in the skb's metadata (hardware-accelerated tag)."""
        self._add(_LD | _W | _ABS, _VLAN_TAG_PRESENT)

    def load_memory(self, slot: int) -> None:
        self._add(_LD | _MEM, slot)

    def load_x_memory(self, slot: int) -> None:
        self._add(_LDX | _MEM, slot)

    def load_x_ipv4_length(self, offset: int) -> None:
        """X = the length of the IPv4 header at ``offset``."""
        self._add(_LDX | _B | _MSH, offset)

    def set_x(self, value: int) -> None:
        self._add(_LDX | _IMM, value)

    def store(self, slot: int) -> None:
        self._add(_ST, slot)

    def store_x(self, slot: int) -> None:
        self._add(_STX, slot)

    def a_to_x(self) -> None:
        self._add(_MISC | _TAX, 0)

    def x_to_a(self) -> None:
        self._add(_MISC | _TXA, 0)

    def mask(self, bits: int) -> None:
        self._add(_ALU | _AND, bits)

    def plus(self, value: int) -> None:
        self._add(_ALU | _ADD, value)

    def plus_x(self) -> None:
        self._add(_ALU | _ADD | _X, 0)

    def shift(self, bits: int) -> None:
        self._add(_ALU | _LSH, bits)

    # -- jumps -------------------------------------------------------------------------------------

    def equal(self, values: int | Iterable[int], label: str) -> None:
        """Jump to the label if A is one of these values."""
        for value in [values] if isinstance(values, int) else values:
            self._test(_JEQ, value, label)

    def unequal(self, value: int, label: str) -> None:
        self._test(_JEQ, value, label, met=False)

    def unequal_x(self, label: str) -> None:
        self._test(_JEQ | _X, 0, label, met=False)

    def below(self, value: int, label: str) -> None:
        self._test(_JGE, value, label, met=False)

    def need(self, length: int, label: str, *, scratch: int | None = None) -> None:
        """Jump to the label if the frame is shorter than ``length`` (with ``scratch``: X + ``length``)."""
        if scratch is None:
            self._add(_LD | _W | _LEN, 0)
            self.below(length, label)
            return
        self.store_x(scratch)
        self.x_to_a()
        self.plus(length)
        self.a_to_x()
        self._add(_LD | _W | _LEN, 0)
        self._test(_JGE | _X, 0, label, met=False)
        self.load_x_memory(scratch)

    def go(self, label: str) -> None:
        self._add(_JMP | _JA, label)

    def end(self, value: int) -> None:
        self._add(_RET, value & 0xFFFFFFFF)

    def label(self, name: str) -> None:
        assert name not in self._labels, name
        self._labels[name] = len(self._code)

    def program(self) -> BpfProgram:
        code = bytearray()
        for at, (operation, met, unmet, operand) in enumerate(self._code):
            if isinstance(operand, str):
                operand = self._labels[operand] - at - 1
                assert operand >= 0, "classic BPF has no way back"
            code += _INSTRUCTION.pack(operation, met, unmet, operand)
        assert len(self._code) <= _MOST
        return BpfProgram(bytes(code))

    def _test(self, operation: int, value: int, label: str, *, met: bool = True) -> None:
        self._code.append((_JMP | operation, int(not met), int(met), value))
        self.go(label)

    def _add(self, operation: int, operand: int | str) -> None:
        self._code.append((operation, 0, 0, operand))

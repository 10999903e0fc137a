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
from enum import IntEnum

_SIZES = {4: 0x20, 2: 0x28, 1: 0x30}  # BPF_LD with BPF_ABS; with BPF_IND it is 0x20 more
_INSTRUCTION = struct.Struct("=HBBI")
_MOST = 4096  # BPF_MAXINSNS
_SO_ATTACH_FILTER = 26  # include/uapi/asm-generic/socket.h
#: The offset at which a load finds whether the skb has a VLAN tag in its metadata (hardware-accelerated):
#: SKF_AD_OFF + SKF_AD_VLAN_TAG_PRESENT.
VLAN_TAG_PRESENT = 0xFFFFF000 + 48


class Op(IntEnum):
    """Instructions (include/uapi/linux/bpf_common.h) on the accumulator A and the index register X."""

    LOAD_LENGTH = 0x80  # A = the length of the frame
    LOAD_SLOT = 0x60  # A = a slot of the memory
    STORE_SLOT = 0x02
    LOAD_X = 0x01  # X = a number
    LOAD_X_IPV4_LENGTH = 0xB1  # X = the length of the IPv4 header at an offset
    X_IS_A = 0x07
    A_IS_X = 0x87
    PLUS = 0x04
    PLUS_X = 0x0C
    MINUS_X = 0x1C
    AND = 0x54
    SHIFT_LEFT = 0x64
    JUMP = 0x05
    JUMP_IF_EQUAL = 0x15
    JUMP_IF_EQUAL_X = 0x1D
    JUMP_IF_LEAST = 0x35  # if A is at least the number
    JUMP_IF_LEAST_X = 0x3D
    RETURN = 0x06


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
        program = struct.pack("@HP", self.length, ctypes.addressof(code))
        to.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


@dataclass
class Assembler:
    """Assembles a program with labels.

    A test is followed by a 32-bit jump, because the offsets of a test reach only 255 instructions.
    """

    _code: list[tuple[int, int, int, int | str]] = field(default_factory=list)
    _labels: dict[str, int] = field(default_factory=dict)

    def add(self, operation: int, operand: int | str = 0) -> None:
        self._code.append((operation, 0, 0, operand))

    def load(self, offset: int, size: int, *, behind_x: bool = False) -> None:
        """A = ``size`` bytes of the frame at ``offset`` (relative to X if ``behind_x``)."""
        self.add(_SIZES[size] + 0x20 * behind_x, offset)

    def mask(self, bits: int) -> None:
        self.add(Op.AND, bits)

    def equal(self, values: int | Iterable[int], label: str) -> None:
        """Jump to the label if A is one of these values."""
        for value in [values] if isinstance(values, int) else values:
            self._test(Op.JUMP_IF_EQUAL, value, label)

    def unequal(self, value: int, label: str) -> None:
        self._test(Op.JUMP_IF_EQUAL, value, label, met=False)

    def unequal_x(self, label: str) -> None:
        self._test(Op.JUMP_IF_EQUAL_X, 0, label, met=False)

    def below(self, value: int, label: str) -> None:
        self._test(Op.JUMP_IF_LEAST, value, label, met=False)

    def need(self, length: int, label: str, *, behind_x: bool = False) -> None:
        """Jump to the label if the frame is shorter than ``length`` (with ``behind_x``: X + ``length``)."""
        self.add(Op.LOAD_LENGTH)
        if behind_x:
            self._test(Op.JUMP_IF_LEAST_X, 0, label, met=False)
            self.add(Op.MINUS_X)
        self.below(length, label)

    def go(self, label: str) -> None:
        self.add(Op.JUMP, label)

    def end(self, value: int) -> None:
        self.add(Op.RETURN, value & 0xFFFFFFFF)

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
        self._code.append((operation, int(not met), int(met), value))
        self.go(label)

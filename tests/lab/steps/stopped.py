"""A process that the kernel has stopped at a system call: its arguments, its memory, its descriptors."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.lab.steps.filter import NAMES

# linux/seccomp.h
_RECEIVE, _ANSWER, _STILL = 0xC0502100, 0xC0182101, 0x40082102
_NOTIFICATION = struct.Struct("=QIIiIQ6Q")
_RESPONSE = struct.Struct("=QqiI")
_CONTINUE = 1
_MESSAGE = struct.Struct("=QI4xQQQQi4x")  # struct msghdr, x86-64
_PART = struct.Struct("=QQ")  # struct iovec
_MOST_PARTS, _MOST_TEXT = 1024, 4096
_SIGNED = 1 << 63


class Gone(Exception):
    """The process has ended meanwhile, or a signal has ended its call."""


@dataclass
class Stopped:
    """One call. It goes on when it is answered."""

    listener: int
    cookie: int
    tid: int
    number: int
    args: tuple[int, ...]
    _pid: int = field(default=0)

    @staticmethod
    def next_of(listener: int) -> Stopped:
        """The next one. Raises: Gone."""
        raw = bytearray(_NOTIFICATION.size)
        try:
            fcntl.ioctl(listener, _RECEIVE, raw)
        except OSError as error:
            raise Gone from error
        cookie, tid, _, number, _, _, *args = _NOTIFICATION.unpack(raw)
        return Stopped(listener, cookie, tid, number, tuple(args))

    @property
    def call(self) -> str:
        return NAMES.get(self.number, f"number {self.number}")

    @property
    def pid(self) -> int:
        """The process of the thread."""
        if not self._pid:
            try:
                with open(f"/proc/{self.tid}/status") as status:
                    self._pid = next(int(line.split()[1]) for line in status if line.startswith("Tgid:"))
            except OSError as error:
                raise Gone from error
        return self._pid

    # -- what it is about to do --------------------------------------------------------------------

    def memory(self, address: int, length: int) -> bytes:
        """Raises: Gone."""
        if length == 0:
            return b""
        try:
            with open(f"/proc/{self.tid}/mem", "rb", buffering=0) as memory:
                return os.pread(memory.fileno(), length, address)
        except OSError as error:
            raise Gone from error

    def text(self, address: int) -> str:
        """A string that ends with a zero byte. Reads up to the end of the page, and on from there."""
        found = b""
        while address and len(found) < _MOST_TEXT:
            part = self.memory(address, 4096 - address % 4096)
            found += part.split(b"\0")[0]
            if b"\0" in part:
                break
            address += len(part)
        return found.decode(errors="replace")

    def data(self) -> bytes:
        """What it would send or write."""
        if self.call in ("sendmsg", "writev"):
            at, count = self.args[1:3]
            if self.call == "sendmsg":
                _, _, at, count, *_ = _MESSAGE.unpack(self.memory(self.args[1], _MESSAGE.size))
            raw = self.memory(at, min(count, _MOST_PARTS) * _PART.size)
            return b"".join(self.memory(*part) for part in _PART.iter_unpack(raw))
        return self.memory(self.args[1], self.args[2])

    def link(self, descriptor: int) -> str:
        """What a descriptor of it is: a path, or such as ``socket:[12]``."""
        try:
            return os.readlink(f"/proc/{self.tid}/fd/{descriptor}")
        except OSError:
            return "?"

    @contextmanager
    def descriptor(self) -> Iterator[int]:
        """The descriptor that the call is about, in this process. Raises: Gone."""
        taken = self._take()
        try:
            yield taken
        finally:
            os.close(taken)

    @contextmanager
    def taken(self) -> Iterator[socket.socket]:
        """The same, if it is a socket."""
        with socket.socket(fileno=self._take()) as end:
            yield end

    def socket(self) -> socket.socket:
        """The same, for the caller to close."""
        return socket.socket(fileno=self._take())

    def _take(self) -> int:
        try:
            process = os.pidfd_open(self.pid)
        except OSError as error:
            raise Gone from error
        try:
            return take(process, self.args[0])
        except OSError as error:
            raise Gone from error
        finally:
            os.close(process)

    # -- how it goes on ----------------------------------------------------------------------------

    def go_on(self) -> None:
        """As if nothing had stopped it."""
        self._answer(0, 0, _CONTINUE)

    def fails(self, number: int) -> None:
        """With this errno, and nothing done."""
        self._answer(0, -number, 0)

    def returns(self, value: int) -> None:
        """With this value; what the call is for was done here, or is not done."""
        self._answer(value, 0, 0)

    def _answer(self, value: int, error: int, flags: int) -> None:
        try:
            fcntl.ioctl(self.listener, _ANSWER, bytearray(_RESPONSE.pack(self.cookie, value, error, flags)))
        except OSError:
            pass  # it has ended meanwhile


def take(process: int, descriptor: int) -> int:
    """A descriptor of a process (a pidfd), in this one: pidfd_getfd(2). Raises: OSError."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    found: int = libc.syscall(438, process, descriptor, 0)
    if found < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    return found

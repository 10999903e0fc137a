"""The kernel stops a process at each system call by which it may act on what is outside it.

The mechanism is seccomp_unotify(2).
What is listed here is what a process does to itself, or what only reads: all other calls are notified.
A call that nobody has thought of is therefore notified too.
"""

from __future__ import annotations

import ctypes
import os
import struct

#: Where the stopped process has the listener: a number that nothing else uses.
LISTENER = 1000
#: Calls of x86-64 (arch/x86/entry/syscalls/syscall_64.tbl) that change nothing outside the process.
_INWARD = """
0 read 3 close 4 stat 5 fstat 6 lstat 7 poll 8 lseek 9 mmap 10 mprotect 11 munmap 12 brk 13 rt_sigaction
14 rt_sigprocmask 15 rt_sigreturn 17 pread64 19 readv 21 access 22 pipe 23 select 24 sched_yield 25 mremap
27 mincore 28 madvise 32 dup 33 dup2 34 pause 35 nanosleep 36 getitimer 38 setitimer 39 getpid 41 socket
43 accept 45 recvfrom 47 recvmsg 50 listen 51 getsockname 52 getpeername 53 socketpair 54 setsockopt
55 getsockopt 56 clone 57 fork 58 vfork 60 exit 61 wait4 63 uname 72 fcntl 73 flock 78 getdents 79 getcwd
80 chdir 81 fchdir 89 readlink 95 umask 96 gettimeofday 97 getrlimit 98 getrusage 99 sysinfo 100 times
102 getuid 104 getgid 107 geteuid 108 getegid 110 getppid 111 getpgrp 112 setsid 115 getgroups 118 getresuid
120 getresgid 121 getpgid 124 getsid 127 rt_sigpending 128 rt_sigtimedwait 130 rt_sigsuspend 131 sigaltstack
137 statfs 138 fstatfs 140 getpriority 143 sched_getparam 145 sched_getscheduler 146 sched_get_priority_max
147 sched_get_priority_min 157 prctl 158 arch_prctl 160 setrlimit 186 gettid 191 getxattr 192 lgetxattr
193 fgetxattr 194 listxattr 202 futex 204 sched_getaffinity 213 epoll_create 217 getdents64
218 set_tid_address 221 fadvise64 228 clock_gettime 229 clock_getres 230 clock_nanosleep 231 exit_group
232 epoll_wait 233 epoll_ctl 234 tgkill 239 get_mempolicy 247 waitid 262 newfstatat 267 readlinkat
269 faccessat 270 pselect6 271 ppoll 273 set_robust_list 274 get_robust_list 281 epoll_pwait
283 timerfd_create 284 eventfd 286 timerfd_settime 287 timerfd_gettime 288 accept4 289 signalfd4 290 eventfd2
291 epoll_create1 292 dup3 293 pipe2 294 inotify_init1 254 inotify_add_watch 255 inotify_rm_watch 295 preadv
299 recvmmsg 302 prlimit64 309 getcpu 317 seccomp 318 getrandom 324 membarrier 327 preadv2 332 statx 334 rseq
434 pidfd_open 435 clone3 436 close_range 438 pidfd_getfd 439 faccessat2 441 epoll_pwait2
"""
#: The names of those that are notified and that this package knows more of.
NAMES = {
    1: "write",
    2: "open",
    16: "ioctl",
    18: "pwrite64",
    20: "writev",
    42: "connect",
    44: "sendto",
    46: "sendmsg",
    48: "shutdown",
    49: "bind",
    59: "execve",
    62: "kill",
    74: "fsync",
    75: "fdatasync",
    76: "truncate",
    77: "ftruncate",
    82: "rename",
    83: "mkdir",
    84: "rmdir",
    86: "link",
    87: "unlink",
    88: "symlink",
    90: "chmod",
    91: "fchmod",
    92: "chown",
    93: "fchown",
    94: "lchown",
    257: "openat",
    258: "mkdirat",
    260: "fchownat",
    263: "unlinkat",
    264: "renameat",
    265: "linkat",
    266: "symlinkat",
    268: "fchmodat",
    280: "utimensat",
    307: "sendmmsg",
    308: "setns",
    316: "renameat2",
}
# linux/seccomp.h, linux/bpf_common.h, linux/audit.h
_SET_MODE_FILTER, _NEW_LISTENER, _WAIT_KILLABLE = 1, 1 << 3, 1 << 5
_NOTIFY, _ALLOW = 0x7FC00000, 0x7FFF0000
_LOAD, _EQUAL, _ANY_BIT, _GREATER, _RETURN = 0x20, 0x15, 0x45, 0x25, 0x06
_NUMBER, _FIRST, _SECOND, _THIRD = 0, 16, 24, 32  # offsets in struct seccomp_data
_WRITE, _OPEN, _OPENAT, _LAST_STANDARD = 1, 2, 257, 2
_IOCTL = 16
# asm-generic/ioctls.h: TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
_INWARD_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
_CHANGES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_SYS_SECCOMP = 317


class FilterError(Exception):
    """The kernel does not let a process be stopped at its calls."""


def inward() -> dict[int, str]:
    """The calls that are not notified, by number."""
    words = _INWARD.split()
    return dict(zip(map(int, words[::2]), words[1::2], strict=True))


def _program() -> bytes:
    """The filter as classic BPF. Each allowed call is compared and returns at once."""

    def op(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
        return struct.pack("HBBI", code, yes, no, value)

    parts = [op(_LOAD, _NUMBER)]
    for number in inward():
        parts += [op(_EQUAL, number, 0, 1), op(_RETURN, _ALLOW)]
    # What is written to the standard streams is the log.
    parts += [op(_EQUAL, _WRITE, 0, 4), op(_LOAD, _FIRST), op(_GREATER, _LAST_STANDARD, 1, 0)]
    parts += [op(_RETURN, _ALLOW), op(_RETURN, _NOTIFY)]
    # Of a descriptor's own mode, and whether it is a terminal.
    parts += [op(_EQUAL, _IOCTL, 0, 2 + 2 * len(_INWARD_IOCTLS)), op(_LOAD, _SECOND)]
    for number in _INWARD_IOCTLS:
        parts += [op(_EQUAL, number, 0, 1), op(_RETURN, _ALLOW)]
    parts.append(op(_RETURN, _NOTIFY))
    # Files that are opened for reading.
    for number, flags in ((_OPEN, _SECOND), (_OPENAT, _THIRD)):
        parts += [op(_EQUAL, number, 0, 4), op(_LOAD, flags), op(_ANY_BIT, _CHANGES, 1, 0)]
        parts += [op(_RETURN, _ALLOW), op(_RETURN, _NOTIFY)]
    parts.append(op(_RETURN, _NOTIFY))
    return b"".join(parts)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def install() -> None:
    """From here on this process stops at each such call until whoever has its listener lets it go on.

    Its threads and the programs that it runs stop too. The listener is at the descriptor `LISTENER`,
    from where another process takes it (pidfd_getfd(2)). Call it while there is one thread only.

    Raises: FilterError.
    """
    if os.uname().machine != "x86_64":
        raise FilterError("the numbers of the calls are those of x86-64")
    text = _program()
    buffer = ctypes.create_string_buffer(text, len(text))
    program = _Program(len(text) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    flags = _NEW_LISTENER | _WAIT_KILLABLE
    listener = libc.syscall(_SYS_SECCOMP, _SET_MODE_FILTER, flags, ctypes.byref(program))
    if listener < 0:
        raise FilterError(f"seccomp: {os.strerror(ctypes.get_errno())}")
    os.dup2(listener, LISTENER, inheritable=False)
    os.close(listener)

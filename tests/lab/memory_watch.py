"""What an agent has in use of its memory, without what malloc keeps. Also an agent that is watched so.

    python -m tests.lab.memory_watch FILE ARGUMENTS...

runs ``netplugin-agent`` with the arguments and writes to FILE, every second, what is in use.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

_EVERY_S = 1.0
#: Without the freed pieces that each thread keeps at hand, which malloc counts as in use (glibc's manual,
#: "Memory Allocation Tunables").
_TUNABLES = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}
#: More than fit into the table of interned strings of an agent that has just started.
_MANY = 50_000


class _Mallinfo2(ctypes.Structure):
    """mallinfo(3), of all arenas."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


@dataclass(frozen=True, slots=True)
class InUse:
    """What malloc has given out: all of it with ``PYTHONMALLOC=malloc``, which an installed agent has."""

    malloc_mb: float

    @staticmethod
    def now() -> InUse:
        """What this process has in use."""
        mallinfo2 = ctypes.CDLL(None).mallinfo2
        mallinfo2.restype = _Mallinfo2
        found = mallinfo2()
        return InUse((found.uordblks + found.hblkhd) / 2**20)

    @staticmethod
    def read(path: Path) -> InUse:
        """What the watched agent wrote last. Raises: OSError before it has."""
        return InUse(**json.loads(path.read_text()))


def _write(path: Path) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(asdict(InUse.now())))
    os.replace(fresh, path)


def _let_names_come() -> None:
    """Make the table of interned strings as large as it gets.

    pathlib interns the parts of each path (of Python 3.11: ``_Flavour.parse_parts``), and the table keeps the
    places of strings that have gone until it is made anew. It would be, once, after some thousand ports, and
    take a megabyte more.
    """
    for number in range(_MANY):
        sys.intern(f"name-{number}")


def main() -> int:
    if not _TUNABLES.items() <= os.environ.items():
        words = [sys.executable, "-m", "tests.lab.memory_watch", *sys.argv[1:]]
        os.execve(sys.executable, words, os.environ | _TUNABLES)
    from agents.main import main as run

    _let_names_come()
    path = Path(sys.argv[1])
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_EVERY_S):
            _write(path)

    _write(path)
    watching = threading.Thread(target=watch, name="memory-watch")
    watching.start()
    try:
        return run(sys.argv[2:])
    finally:
        ended.set()
        watching.join()


if __name__ == "__main__":
    sys.exit(main())

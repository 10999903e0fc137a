"""Notes what the event loop waits for: files, names, programs, sleep. Also an agent that is watched so.

    python -m tests.lab.loop_watch FILE ARGUMENTS...

runs ``netplugin-agent`` with the arguments and writes what was found to FILE, one JSON object a line.
"""

from __future__ import annotations

import asyncio
import grp
import json
import pwd
import sqlite3
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Events of the interpreter (https://docs.python.org/3/library/audit_events.html) that may take any time.
WAITS = frozenset(
    {
        "open",
        "os.listdir",
        "os.scandir",
        "os.fork",
        "os.posix_spawn",
        "os.system",
        "os.remove",
        "os.rename",
        "os.mkdir",
        "os.rmdir",
        "os.chmod",
        "os.chown",
        "os.truncate",
        "fcntl.flock",
        "fcntl.lockf",
        "socket.getaddrinfo",
        "socket.gethostbyname",
        "socket.gethostbyaddr",
        "socket.getnameinfo",
        "sqlite3.connect",
        "subprocess.Popen",
        "time.sleep",
    }
)
_OURS = ("/agents/", "/netplugin/", "/drivers/")


class LoopWatch:
    """Install it once per process; ``found`` is what happened on a thread whose event loop was running."""

    def __init__(self, tell: Callable[[dict[str, Any]], None] = lambda found: None) -> None:
        self.found: list[dict[str, Any]] = []
        self.on = True
        self._tell = tell
        self._busy = threading.local()

    def install(self) -> None:
        """Also for names of users and groups, which may be asked of a server."""
        sys.addaudithook(self._audited)
        for module in (grp, pwd):
            for name in [name for name in dir(module) if name.startswith("get")]:
                setattr(module, name, self.wrapped(getattr(module, name), f"{module.__name__}.{name}"))

    def wrapped(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """The function, with its calls on an event loop noted."""

        def called(*args: Any, **kwargs: Any) -> Any:
            self.note(name, args)
            return function(*args, **kwargs)

        return called

    def connection(self, sql: sqlite3.Connection) -> None:
        """Note the statements of a connection."""
        sql.set_trace_callback(lambda statement: self.note("sqlite3.execute", (statement,)))

    def lock(self) -> WatchedLock:
        """A lock that notes who takes it on an event loop."""
        return WatchedLock(self)

    def _audited(self, event: str, args: tuple[Any, ...]) -> None:
        if event in WAITS:
            self.note(event, args)

    def note(self, what: str, args: tuple[Any, ...]) -> None:
        if not self.on or asyncio._get_running_loop() is None or getattr(self._busy, "is", False):
            return
        self._busy.__dict__["is"] = True
        try:
            stack = [f"{f.filename}:{f.lineno} {f.name}" for f in traceback.extract_stack()]
            if any(line.endswith("_fill_cache") for line in stack):
                return  # a library asks for a module that is not installed; one that is there is opened
            ours = [line for line in stack if any(part in line for part in _OURS)]
            found = {"what": what, "args": repr(args)[:200], "ours": ours[-4:], "last": stack[-6:-2]}
            self.found.append(found)
            self._tell(found)
        finally:
            self._busy.__dict__["is"] = False


class WatchedLock:
    """A reentrant lock as ``threading.RLock`` makes it."""

    def __init__(self, watch: LoopWatch) -> None:
        self._lock = threading.RLock()
        self._watch = watch

    def __enter__(self) -> bool:
        self._watch.note("lock", ())
        return self._lock.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._lock.release()


def main() -> int:
    from agents.main import main as run
    from agents.store import database

    path = Path(sys.argv[1])

    def tell(found: dict[str, Any]) -> None:
        with path.open("a") as file:
            file.write(json.dumps(found) + "\n")

    watch = LoopWatch(tell)
    connect = database.sqlite3.connect

    def watched(*args: Any, **kwargs: Any) -> sqlite3.Connection:
        made = connect(*args, **kwargs)
        watch.connection(made)
        return made

    database.sqlite3.connect = watched  # type: ignore[assignment]
    watch.install()
    path.touch()
    return run(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())

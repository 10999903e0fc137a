"""A headless Chromium, controlled over a pipe (the DevTools protocol), and what it reports."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.lab.processes import LabError, LabTimeout, wait_for

#: Chromium without a window: it needs no GTK.
_PROGRAM = "chromium-headless-shell"
#: Where Chromium reads commands, and writes answers.
_COMMANDS, _ANSWERS = 3, 4
_OPTIONS = (
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-crash-reporter",
    "--no-default-browser-check",
    "--password-store=basic",
    "--use-mock-keychain",
    "--hide-scrollbars",
)


class Chromium:
    """One browser with one page. ``folder`` takes its profile and what it writes to standard error."""

    def __init__(self, folder: Path, deadline_s: float = 60.0) -> None:
        self._deadline_s = deadline_s
        self._number = 0
        self._session: str | None = None
        self._buffer = b""
        #: Events of the page since it was opened: method and parameters.
        self.events: list[tuple[str, Mapping[str, Any]]] = []
        self._log = folder / "chromium.log"
        self._start(folder)
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
            self._session = attached["sessionId"]
            for domain in ("Page", "Network", "Log", "Runtime"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- commands --------------------------------------------------------------------------------

    def open(self, url: str) -> None:
        """Until everything is loaded; events of the page before are forgotten."""
        self.events.clear()
        self.call("Page.navigate", url=url)
        self.wait("Page.loadEventFired")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression on the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            raise LabError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def size(self, width: int, height: int = 900) -> None:
        """Of the window, in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def dark(self, on: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if on else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self) -> bytes:
        """The window as PNG."""
        data: str = self.call("Page.captureScreenshot", format="png")["data"]
        return base64.b64decode(data)

    # -- reports ---------------------------------------------------------------------------------

    @property
    def requested(self) -> list[str]:
        """Every address that the page requested."""
        return [e["request"]["url"] for name, e in self.events if name == "Network.requestWillBeSent"]

    @property
    def complaints(self) -> list[str]:
        """What is on the console: errors, warnings, exceptions, refused loads."""
        names = (
            "Log.entryAdded",
            "Runtime.consoleAPICalled",
            "Runtime.exceptionThrown",
        )
        return [json.dumps(event) for name, event in self.events if name in names]

    # -- the protocol ----------------------------------------------------------------------------

    def call(self, method: str, **parameters: Any) -> Mapping[str, Any]:
        """Raises: LabError with its error; LabTimeout."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + self._deadline_s
        while True:
            answer = self._next(end, method)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise LabError(f"{method}: {answer['error']}")
                result: Mapping[str, Any] = answer["result"]
                return result

    def wait(self, event: str) -> None:
        """Until this event was seen since the page was opened."""
        end = time.monotonic() + self._deadline_s
        while not any(name == event for name, _ in self.events):
            self._next(end, event)

    def _next(self, end: float, what: str) -> Mapping[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise LabTimeout(f"chromium: no answer to {what}\n{self._printed()}")
            read = os.read(self._from, 1 << 16)
            if not read:
                raise LabError(f"chromium has ended\n{self._printed()}")
            self._buffer += read
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: Mapping[str, Any] = json.loads(line)
        if "method" in message:
            self.events.append((message["method"], message["params"]))
        return message

    # -- the process -----------------------------------------------------------------------------

    def _start(self, folder: Path) -> None:
        program = shutil.which(_PROGRAM)
        if program is None:
            raise LabError(f"{_PROGRAM} is not installed (a Debian package of this name)")
        commands, self._to = _high_pipe()
        self._from, answers = _high_pipe()
        log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        home = {
            "HOME": str(folder),
            "XDG_CONFIG_HOME": str(folder),
            "XDG_CACHE_HOME": str(folder),
        }
        try:
            self._pid = os.posix_spawn(
                program,
                [program, *_OPTIONS, f"--user-data-dir={folder / 'profile'}"],
                {**os.environ, **home},
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, commands, _COMMANDS),
                    (os.POSIX_SPAWN_DUP2, answers, _ANSWERS),
                    (os.POSIX_SPAWN_DUP2, log, 1),
                    (os.POSIX_SPAWN_DUP2, log, 2),
                ],
                # With its own children a group of its own, so that they can be ended together.
                setpgroup=0,
            )
        finally:
            for file in (commands, answers, log):
                os.close(file)

    def close(self) -> None:
        """It ends when its pipe does; what is left of it after that is killed."""
        for file in (self._to, self._from):
            with suppress(OSError):
                os.close(file)
        with suppress(LabTimeout):
            wait_for(self._ended, 5.0, "chromium ends")
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self._pid, 0)

    def _ended(self) -> bool:
        """Without taking its status: until then its number, and that of its group, is its own."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self._pid, flags) is not None

    def _printed(self) -> str:
        return self._log.read_text(errors="replace")[-2000:]


def _high_pipe() -> tuple[int, int]:
    """Whose ends are not among the numbers that Chromium wants, and not inherited."""
    ends = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 64) for end in ends]
    for end in ends:
        os.close(end)
    return high[0], high[1]

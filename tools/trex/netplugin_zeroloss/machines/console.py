"""A machine on a serial console.

The console's shell is replaced by a loop that reads commands and prints answers, one line each, in base64 and
with a checksum: a kernel message between them can neither be taken for an answer nor falsify one.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import math
import os
import re
import select
import shlex
import socket
import stat
import termios
import time
import tty
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from netplugin.host.processes import printable
from netplugin.programs.program import Program, ProgramError
from netplugin_zeroloss.machines.contract import (
    COMMAND_S,
    ConsoleMachine,
    Machine,
    MachineError,
    checked,
)

#: A prompt is complete if nothing follows it for so many seconds.
_QUIET_S: Final = 0.3
#: A VM has so many seconds to say something after what it was sent: an empty line that comes too early is
#: taken for the password.
_PATIENCE_S: Final = 10.0
#: What ``_QUIET_S`` is after a log-in that was rejected: no prompt of before is answered again.
_CAREFUL_S: Final = 3.0
#: An answer that does not come is requested again after so many seconds.
_AGAIN_S: Final = 5.0
#: Seconds beyond those of a command, for a slow console.
_SLACK_S: Final = 15.0
#: Seconds for a program to end before it is killed.
_END_S: Final = 10
_LOOK_S: Final = 0.2
_TRIES: Final = 3
#: Characters a line; a terminal keeps no more than 4,095 of one.
_CHUNK: Final = 512
#: Characters of the longest line: the output of a command in base64. Before a log-in the last of them count.
_LONGEST: Final = 2 << 20
_LAST: Final = 1 << 14
_ANSI: Final = re.compile(r"\x1b(\[[0-9;?]{0,40}[A-Za-z]|\][^\x07]{0,400}\x07)")
_PASSWORD: Final = ("assword:", "asswort:")
_READY: Final = re.compile(r"^zl-ready (/\S{1,200}) *\n", re.MULTILINE)
_ANSWER: Final = re.compile(r"zl ((\d{1,9}) (\d{1,3}|\?) \.(\S*) \.(\S*)) ([0-9a-f]{16})")
_PID: Final = re.compile(r"[0-9]{1,9}")
#: Sent as one line to the shell, which may echo it: no marker occurs in it as it is printed. Lines that it
#: reads: ``add NUMBER - BASE64``, ``run NUMBER SECONDS SUM``, ``again``, ``bye``; to an empty one it says
#: that it is there. ``?`` is the status of what came garbled.
_LOOP: Final = "; ".join(
    (
        "stty -echo 2> /dev/null",
        "dmesg -n 1 2> /dev/null",
        "d=$(mktemp -d /run/netplugin-vnf-XXXXXX) || exit 1",
        ": > $d/.in",
        'sum() { sha256sum < "$1" | cut -c 1-16; }',
        'text() { base64 < "$1" | tr -d "\\n"; }',
        'echo "zl-""ready $d"',
        "while read -r w n s x"
        '; do case "$w" in'
        ' "") echo "zl-""loop" ;;'
        ' add) echo "$x" >> $d/.in ;;'
        ' run) if [ "$(sum $d/.in)" = "$x" ]'
        "; then base64 -d < $d/.in > $d/.sh"
        "; timeout -s KILL $s sh $d/.sh < /dev/null > $d/.out 2> $d/.err"
        '; echo "$n $? .$(text $d/.out) .$(text $d/.err)" > $d/.answer'
        '; else echo "$n ? . ." > $d/.answer; fi; : > $d/.in ;;'
        " bye) for p in $(cat $d/*.pid 2> /dev/null); do kill -KILL -$p; done"
        '; rm -rf $d; echo "zl-""gone"; exit ;; esac'
        '; case "$w" in run|again) echo "zl $(cat $d/.answer) $(sum $d/.answer)" ;; esac; done',
    )
)


class Console(Machine):
    """A VM with a shell, or a log-in prompt, on a serial port. Programs end with ``close``."""

    def __init__(self, description: ConsoleMachine, deadline: float) -> None:
        """Log in; the VM may still be booting. Raises: MachineError if there is no shell at the deadline."""
        self._description = description
        self._numbers = itertools.count(1)
        self._received = ""
        self._port = _opened(description.path)
        try:
            self.directory = self._log_in(deadline)
        except BaseException:
            self._hang_up()
            raise

    def run(self, arguments: Sequence[str], stdin: str | None = None) -> str:
        script = shlex.join(arguments)
        if stdin is not None:
            script = f"echo {_encoded(stdin)} | base64 -d | {script}"
        return checked(arguments, *self.ask(script))

    def write(self, path: str, text: str) -> None:
        self.run(["tee", path], stdin=text)

    def program(self, name: str, arguments: Sequence[str]) -> Program:
        return _ConsoleProgram(name, arguments, self)

    def close(self) -> None:
        if self._port < 0:
            return
        with suppress(MachineError, OSError):  # the VM may be gone
            self._send("bye")
            self._until(lambda line: "zl-gone" in line, time.monotonic() + _SLACK_S)
        self._hang_up()

    def ask(self, script: str, seconds: float = COMMAND_S) -> tuple[int, str, str]:
        """Run a shell script; returns its exit status (137: killed at the limit), output and errors.

        Raises: MachineError if the console does not answer.
        """
        for _ in range(_TRIES):
            number = next(self._numbers)
            status, output, errors = self._ask(number, _encoded(script), seconds)
            if status != "?":
                return int(status), output, errors
        raise MachineError(f"{self._description.path}: what is sent to this console arrives garbled")

    # -- inside ----------------------------------------------------------------------------------

    def _ask(self, number: int, encoded: str, seconds: float) -> tuple[str, str, str]:
        chunks = [encoded[at : at + _CHUNK] for at in range(0, len(encoded), _CHUNK)]
        for chunk in chunks:
            self._send(f"add {number} - {chunk}")
        stored = "".join(f"{chunk}\n" for chunk in chunks)
        self._send(f"run {number} {math.ceil(seconds)} {_sum(stored)}")
        deadline = time.monotonic() + seconds + _SLACK_S
        while True:
            line = self._until(lambda line: f"zl {number} " in line, time.monotonic() + _AGAIN_S)
            found = _ANSWER.search(line or "")
            if found and int(found[2]) == number and _sum(f"{found[1]}\n") == found[6]:
                return found[3], self._decoded(found[4]), self._decoded(found[5])
            if time.monotonic() > deadline:
                raise MachineError(f"{self._description.path}: the console does not answer")
            self._send("again")

    def _decoded(self, text: str) -> str:
        try:
            return base64.b64decode(text).decode(errors="replace")
        except ValueError as error:
            raise MachineError(f"{self._description.path}: an answer is not in base64: {error}") from error

    def _log_in(self, deadline: float) -> str:
        """Come from any state of the console to the loop. Raises: MachineError."""
        path, patience, quiet = self._description.path, 0.0, _QUIET_S
        named = asked = False  # it has our name, our password
        while True:
            self._received = _ANSI.sub("", self._received[-_LAST:])
            if found := _READY.search(self._received):
                self._received = self._received[found.end() :]
                return found[1]
            seen = self._received.rstrip()
            if time.monotonic() > deadline:
                words = printable(seen[-300:])
                raise MachineError(f"{path}: no shell on it in time; its last words:\n{words}")
            if self._read(quiet):
                continue
            last = seen.rpartition("\n")[2]
            if asked and ("Login incorrect" in seen or last.endswith(_PASSWORD)):
                if quiet == _CAREFUL_S:
                    raise MachineError(f"{path}: the VM rejects {self._description.user} and its password")
                # A slow VM may have printed two prompts, of which the first was answered: once more.
                named, asked, quiet, self._received = False, False, _CAREFUL_S, last
                continue
            if last.endswith("login:"):
                named, answer = True, self._description.user
            elif last.endswith(_PASSWORD):
                # Without our name it is the prompt of another user of the console.
                asked, answer = named, self._password() if named else ""
            elif last.endswith(("#", "$")):
                answer = f"exec sh -c '{_LOOP}'"
            elif last == "zl-loop":
                answer = "bye"  # of a run that was killed
            elif time.monotonic() < patience:
                continue
            else:
                # Only this: a boot loader takes letters for commands.
                self._send("")
                self._read(1.0)
                continue
            self._received = ""
            self._send(answer)
            patience = time.monotonic() + _PATIENCE_S

    def _password(self) -> str:
        file = self._description.password_file
        if file is None:
            raise MachineError(f"{self._description.path}: it asks for a password: name its password_file")
        try:
            return file.read_text().rstrip("\n")
        except OSError as error:
            raise MachineError(f"{file}: {error.strerror}") from error

    def _until(self, is_last: Callable[[str], bool], deadline: float) -> str | None:
        """Return the next line that ``is_last`` accepts, and drop those before it; None at the deadline."""
        while (left := deadline - time.monotonic()) > 0:
            *lines, self._received = self._received.split("\n")
            for number, line in enumerate(lines):
                if is_last(line := _ANSI.sub("", line)):
                    self._received = "\n".join([*lines[number + 1 :], self._received])
                    return line
            if len(self._received) > _LONGEST:
                raise MachineError(f"{self._description.path}: it prints a line without end")
            self._read(left)
        return None

    def _read(self, seconds: float) -> bool:
        """Wait for more text. Returns whether some came. Raises: MachineError if the console is gone."""
        if not select.select([self._port], [], [], seconds)[0]:
            return False
        try:
            more = os.read(self._port, 1 << 16)
        except OSError as error:
            raise MachineError(f"{self._description.path}: {error.strerror}") from error
        if not more:
            raise MachineError(f"{self._description.path}: the console was closed: the VM has ended")
        self._received += more.decode(errors="replace").replace("\r", "")
        return True

    def _send(self, text: str) -> None:
        data, path = f"{text}\n".encode(), self._description.path
        deadline = time.monotonic() + _SLACK_S
        while data:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([], [self._port], [], left)[1]:
                raise MachineError(f"{path}: the VM does not read its console")
            try:
                data = data[os.write(self._port, data[:_CHUNK]) :]
            except OSError as error:
                raise MachineError(f"{path}: {error.strerror}") from error

    def _hang_up(self) -> None:
        os.close(self._port)
        self._port = -1


class _ConsoleProgram(Program):
    """A program in the background of the VM. Its exit status is written to a file when it ends."""

    def __init__(self, name: str, arguments: Sequence[str], console: Console) -> None:
        self._console = console
        self._base = f"{console.directory}/{name}"
        self._pid: int | None = None
        super().__init__(f"{name} on the console", arguments, Path(f"{self._base}.log"))

    def start(self, environment: Mapping[str, str] | None = None) -> None:
        program = self._arguments[0]
        if self._console.ask(f"command -v {shlex.quote(program)}")[0]:
            raise ProgramError(f"{program}: there is no such program in the VM; install it, or give its path")
        set_ = [f"{name}={value}" for name, value in (environment or {}).items()]
        # It outlives SIGTERM, to write down the status of the program.
        keeping = f'trap : TERM; "$@"; echo $? > {self._base}.status'
        keeper = shlex.join(["sh", "-c", keeping, "sh", "env", *set_, *self._arguments])
        script = f"setsid {keeper} < /dev/null > {self.log} 2>&1 & echo $! | tee {self._base}.pid"
        printed = checked(self._arguments, *self._console.ask(script)).strip()
        if not _PID.fullmatch(printed):
            raise MachineError(
                f"{self.name}: the VM printed {printed[:100]!r} in place of its process number"
            )
        self._pid = int(printed)

    @property
    def pid(self) -> int | None:
        return self._pid

    def check(self) -> None:
        if self._pid is None:
            raise ProgramError(f"{self.name} has not been started")
        status = self._console.ask(f"cat {self._base}.status 2> /dev/null")[1].strip()
        if status:
            raise ProgramError(f"{self.name} has ended with status {status}{self.log_tail()}")

    def stop(self) -> None:
        if self._pid is None:
            return
        # The group: the keeper, and the program with its children.
        self._console.ask(
            f"kill -TERM -{self._pid}; i=0; while [ ! -s {self._base}.status ] && [ $i -lt {_END_S * 10} ];"
            f" do sleep 0.1; i=$((i+1)); done; kill -KILL -{self._pid} 2> /dev/null; rm -f {self._base}.pid",
            _END_S + COMMAND_S,
        )
        self._pid = None

    def logged(self, text: str) -> bool:
        return self._console.ask(f"grep -qF -- {shlex.quote(text)} {self.log}")[0] == 0

    def log_tail(self) -> str:
        with suppress(ProgramError):
            lines = self._console.ask(f"tail -n 15 {self.log}")[1].splitlines()
            return "".join(f"\n  {line}" for line in lines)
        return ""

    def _wait_end(self, seconds: float) -> None:
        time.sleep(max(seconds, _LOOK_S))


def _opened(path: str) -> int:
    """Open a UNIX socket or a tty. Raises: MachineError."""
    try:
        if stat.S_ISSOCK(os.stat(path).st_mode):
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(path)
                return connection.detach()
        port = os.open(path, os.O_RDWR | os.O_NOCTTY)
        try:
            tty.setraw(port)
        except BaseException:
            os.close(port)
            raise
        return port
    except (OSError, termios.error) as error:
        why = getattr(error, "strerror", None) or "it is neither a UNIX socket nor a tty"
        raise MachineError(f"{path}: {why}") from error


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _sum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]

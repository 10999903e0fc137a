"""The generator ``exec``: any program that speaks JSON lines, as docs/zeroloss/generators.md has them."""

from __future__ import annotations

import json
import os
import selectors
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from subprocess import PIPE
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, TypeAdapter

from netplugin.programs import bounded
from netplugin_zeroloss.generators import contract, ends_with_owner
from netplugin_zeroloss.generators.contract import T
from netplugin_zeroloss.values import GeneratorError, Measurement, TrialRequest, UnusableInput

#: Maximum length of an answer in bytes; a longer line is a protocol error.
_LONGEST_LINE: Final = 1 << 20
#: Bytes of standard error for the error message.
_KEPT: Final = 2000
_PIECE: Final = 1 << 16
#: Seconds a program may take to exit after ``bye``, and then its wrapper to kill it.
_BYE_S: Final = 2.0
_KILLED_S: Final = 5.0


class Exec(contract.GeneratorDescription):
    """A program that speaks JSON lines. The command is quoted as in a shell; no shell is started."""

    type: Literal["exec"] = "exec"
    command: str
    #: Seconds allowed for an answer, in addition to the trial duration.
    answer_timeout_s: contract.Positive = 60.0


@dataclass(frozen=True, slots=True)
class _Hello(contract.GeneratorInfo):
    name: str = "exec"
    ok: bool = field(kw_only=True)


def _completed(hello: Any) -> Any:
    """A limit may be null; a generator of bursts has also those of a mix, unless it says otherwise."""
    if not isinstance(hello, dict):
        return hello
    given = {name: value for name, value in hello.items() if value is not None or name not in _NULLABLE}
    return {"bursts_of_mixes": given.get("bursts", False)} | given


def _rounded(answer: Any) -> Any:
    """Round what counts: programs may send 4200000.0, or the product of a rate and a time."""
    if isinstance(answer, list):
        return list(map(_rounded, answer))
    if not isinstance(answer, dict):
        return answer
    counts = {name: round(n) for name, n in answer.items() if name in _COUNTS and isinstance(n, float)}
    parts = {name: _rounded(part) for name, part in answer.items() if isinstance(part, list)}
    return answer | counts | parts


_NULLABLE: Final = ("max_pps", "line_bps", "bursts_of_mixes")
_COUNTS: Final = (
    *("tx_packets", "rx_packets", "tx_shortfall", "rx_errors", "queue_drops", "queue_full"),
    *("in_flight_packets", "samples"),
)
# What the protocol does not know in an answer is ignored.
_HELLO: Final[TypeAdapter[_Hello]] = TypeAdapter(Annotated[_Hello, BeforeValidator(_completed)])
_MEASUREMENT: Final[TypeAdapter[Measurement]] = TypeAdapter(Annotated[Measurement, BeforeValidator(_rounded)])


class Dialogue:
    """Talks to a child process in JSON lines: one request per line, one answer per line back.

    Every answer has a deadline, and must come after its request. The last lines of standard error are kept
    for the error message, whose prefix is ``who``. The child, in its own process group, ends with this
    process, even if this process is killed.
    """

    def __init__(self, who: str, arguments: Sequence[str]) -> None:
        """Start the program. Raises: UnusableInput if it cannot be started."""
        if shutil.which(arguments[0]) is None:
            raise UnusableInput(who, f"{arguments[0]}: there is no such program, or it may not be run")
        self._who = who
        self._answers = bytearray()
        self._errors = b""
        self._closed = False
        life, self._life = os.pipe()
        command = [sys.executable, "-IS", ends_with_owner.__file__, str(life), "0", str(_BYE_S), *arguments]
        try:
            self._process = process = subprocess.Popen(
                command, 0, None, PIPE, PIPE, PIPE, pass_fds=[life], start_new_session=True
            )
        except OSError as error:
            os.close(self._life)
            raise UnusableInput(who, f"{command[0]}: {error.strerror}") from error
        finally:
            os.close(life)
        assert process.stdin and process.stdout and process.stderr
        self._stdin, self._stdout = process.stdin.fileno(), process.stdout.fileno()
        self._stderr, self._ended = process.stderr.fileno(), os.pidfd_open(process.pid)
        os.set_blocking(self._stdin, False)
        self._selector = selectors.DefaultSelector()
        for source in (self._stdout, self._stderr):
            self._selector.register(source, selectors.EVENT_READ)

    def ask(self, question: Mapping[str, Any], seconds: float, model: TypeAdapter[T]) -> T:
        """Send one request and return the validated answer. Raises: GeneratorError."""
        deadline = time.monotonic() + seconds
        self._wait(0)
        if self._answers:
            raise self.error(f"it answered before it was asked: {bytes(self._answers[:200])!r}")
        try:
            # Shorter than PIPE_BUF: written whole or, while the pipe is full, not at all (pipe(7)).
            os.write(self._stdin, json.dumps(question).encode() + b"\n")
        except BlockingIOError as error:
            raise self.error("it does not read its standard input") from error
        except BrokenPipeError as error:
            raise self.error("it has closed its standard input") from error
        while (end := self._answers.find(b"\n")) < 0:
            if len(self._answers) > _LONGEST_LINE:
                raise self.error("its answer is longer than a line may be")
            left = deadline - time.monotonic()
            if left <= 0:
                raise self.error(f"no answer within {seconds:g} s")
            self._wait(left)
            if self._stdout not in self._selector.get_map():
                raise self.error(self._how_it_ended())
        line = bytes(self._answers[:end])
        del self._answers[: end + 1]
        try:
            answer = bounded.parse(line)
            if isinstance(answer, dict) and answer.get("error"):
                raise self.error(f"it says: {str(answer['error'])[:_KEPT]}")
            return bounded.validated(answer, model)
        except bounded.Unreadable as error:
            raise self.error(f"its answer: {error} (in {line[:200]!r})") from error

    def close(self) -> None:
        """Send ``bye``, wait briefly, then kill the process group. Idempotent."""
        if self._closed:
            return
        self._closed = True
        # Leaving it closes the streams and waits for the end.
        with self._process as process:
            assert process.stdin is not None
            with suppress(OSError):
                os.write(self._stdin, b'{"op":"bye"}\n')
            process.stdin.close()
            # The wrapper waits and kills the process group, which also contains the children of the program.
            os.close(self._life)
            self._wait_end(_BYE_S + _KILLED_S)
            process.kill()
        self._selector.close()
        os.close(self._ended)

    def error(self, what: str) -> GeneratorError:
        """Return an error with the last lines of the program's standard error."""
        self._wait(0)
        error_text = self._errors.decode(errors="replace").strip()
        return GeneratorError(f"{self._who}: {what}" + (f"\nIt wrote:\n{error_text}" if error_text else ""))

    def _wait(self, seconds: float) -> set[int]:
        """Wait for the child and take what it wrote: a piece of each stream. Returns the ready streams."""
        ready = {key.fd for key, _ in self._selector.select(seconds)}
        for stream in ready & {self._stdout, self._stderr}:
            piece = os.read(stream, _PIECE)
            if not piece:
                self._selector.unregister(stream)
            elif stream == self._stdout:
                self._answers += piece
            else:
                self._errors = (self._errors + piece)[-_KEPT:]
        return ready

    def _wait_end(self, seconds: float) -> bool:
        """Take what the child writes until it ends. Returns whether it ended in time."""
        self._selector.register(self._ended, selectors.EVENT_READ)
        deadline = time.monotonic() + seconds
        try:
            while (left := deadline - time.monotonic()) > 0:
                if self._ended in self._wait(left):
                    return True
                self._answers.clear()
            return False
        finally:
            self._selector.unregister(self._ended)

    def _how_it_ended(self) -> str:
        if self._wait_end(_BYE_S):
            return f"it ended with status {self._process.wait()} without an answer"
        return "it closed its standard output"


class ExecGenerator(contract.Generator):
    """A program that speaks JSON lines. ``answer_s``: seconds allowed per answer beyond the trial."""

    def __init__(
        self,
        command: str | Sequence[str],
        answer_s: float = 60.0,
        who: str = "--exec-cmd",
        opened: ExitStack | None = None,
    ) -> None:
        """Start the program and read its ``hello``; ``opened`` is closed after it.

        Raises: UnusableInput, GeneratorError.
        """
        self._answer_s = answer_s
        arguments = _arguments(command) if isinstance(command, str) else command
        with opened or ExitStack() as parts:
            self._dialogue = parts.enter_context(closing(Dialogue(who, arguments)))
            self._info = hello = self._dialogue.ask({"op": "hello", "version": 1}, answer_s, _HELLO)
            if not hello.ok:
                raise self._dialogue.error("it does not want to start: its hello says ok: false")
            self._opened = parts.pop_all()

    def run(self, request: TrialRequest) -> Measurement:
        always = ("rate_pps", "duration_s", "frame_size", "flows", "abort_on_loss")
        question = {"op": "trial"} | {name: getattr(request, name) for name in always}
        optional = {"mix": request.mix, "latency": request.latency, "readings": request.readings}
        optional["burst"] = request.burst if request.burst > 1 else 0
        question |= {name: value for name, value in optional.items() if value}
        takes = 0.0 if self._info.virtual_time else request.duration_s * (1 + contract.LATE_PART)
        return self._dialogue.ask(question, takes + self._answer_s, _MEASUREMENT)


def _arguments(command: str) -> list[str]:
    try:
        arguments = shlex.split(command)
    except ValueError as error:
        raise UnusableInput("--exec-cmd", f"its quotes are not closed: {command!r}") from error
    if not arguments:
        raise UnusableInput("--exec-cmd", "it is empty")
    return arguments

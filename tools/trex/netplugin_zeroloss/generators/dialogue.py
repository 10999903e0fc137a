"""Talks to a child process in JSON lines: one request per line on its input, one answer per line back.

Every answer has a deadline. Standard error is kept for the error message.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any, TypeVar

from pydantic import BaseModel, ValidationError

from netplugin_zeroloss.values import GeneratorError, UnusableInput

#: Maximum length of an answer in bytes; a longer line is a protocol error.
_LONGEST_LINE = 1 << 20
#: Seconds a program may take to exit after ``bye``.
_BYE_S = 2.0

Model = TypeVar("Model", bound=BaseModel)


class Dialogue:
    """A child process in its own process group. ``who`` is the prefix of error messages."""

    def __init__(
        self, who: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        """Start the program. Raises: UnusableInput if it cannot be started."""
        self._who = who
        self._stderr: IO[bytes] = tempfile.TemporaryFile()
        self._buffer = bytearray()
        try:
            self._process = subprocess.Popen(
                arguments,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                env=environment,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            self._stderr.close()
            raise UnusableInput(who, f"{arguments[0]}: {error.strerror}") from error

    def ask(self, question: Mapping[str, Any], seconds: float, model: type[Model]) -> Model:
        """Send one request and return the validated answer. Raises: GeneratorError."""
        deadline = time.monotonic() + seconds
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
        except OSError as error:
            raise self.error("it has closed its standard input") from error
        line = self._read_line(deadline, seconds)
        try:
            answer = json.loads(line)
        except ValueError as error:
            raise self.error(f"its answer is no JSON: {line[:200]!r}") from error
        if isinstance(answer, dict) and answer.get("error"):
            raise self.error(f"it says: {answer['error']}")
        try:
            return model.model_validate(answer)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the answer"
            raise self.error(f"{where}: {first['msg']} (in {line[:200]!r})") from error

    def close(self) -> None:
        """Send ``bye``, wait briefly, then kill the process group. Idempotent."""
        process = self._process
        if process.stdin is not None and not process.stdin.closed:
            try:
                process.stdin.write(b'{"op":"bye"}\n')
                process.stdin.close()
            except OSError:
                pass
        try:
            process.wait(_BYE_S)
        except subprocess.TimeoutExpired:
            pass
        # The process group also contains the children of the program.
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
        if not self._stderr.closed:
            self._stderr.close()

    def error(self, what: str) -> GeneratorError:
        """Return an error with the last lines of the program's standard error."""
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, self._stderr.tell() - 2000))
        said = self._stderr.read().decode(errors="replace").strip()
        return GeneratorError(f"{self._who}: {what}" + (f"\nIt wrote:\n{said}" if said else ""))

    def _read_line(self, deadline: float, seconds: float) -> bytes:
        """Read one line before the deadline; keeps the bytes after it for the next call."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while (end := self._buffer.find(b"\n")) < 0:
                if len(self._buffer) > _LONGEST_LINE:
                    raise self.error("its answer is longer than a line may be")
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise self.error(f"no answer within {seconds:g} s")
                read = os.read(descriptor, 65536)
                if not read:
                    raise self.error(self._how_it_ended())
                self._buffer += read
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    def _how_it_ended(self) -> str:
        try:
            status = self._process.wait(_BYE_S)
        except subprocess.TimeoutExpired:
            return "it closed its standard output"
        return f"it ended with status {status} without an answer"

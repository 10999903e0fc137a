"""The generator ``exec``: any program that speaks JSON lines on its standard input and output.

The program is started once, from an argument list. One object goes out a line, one comes back a line:

    -> {"op":"hello","version":1}
    <- {"ok":true,"name":"mine","max_pps":14880000.0,"virtual_time":false}
    -> {"op":"trial","rate_pps":..,"duration_s":..,"frame_size":64,"flows":1024,"abort_on_loss":true}
    <- {"tx_packets":..,"rx_packets":..,"elapsed_s":..}
    -> {"op":"bye"}

What it writes to standard error is kept for the error message.
"""

from __future__ import annotations

import json
import math
import os
import selectors
import shlex
import signal
import subprocess
import tempfile
import time
from typing import IO, Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from netplugin.acceptance.errors import GeneratorError, UnusableInput
from netplugin.acceptance.generators.contract import Generator, GeneratorInfo
from netplugin.acceptance.values import Direction, Measurement, TrialRequest

#: A program that sends more than this in one line does not speak the protocol.
_LONGEST_LINE = 1 << 20
#: How long a program may take to end after it was told to.
_BYE_S = 2.0
_MODEL = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


def _whole(value: Any) -> Any:
    """Programs that compute with decimals send 4200000.0, or the product of a rate and a time."""
    return round(value) if isinstance(value, float) and math.isfinite(value) else value


Count = Annotated[int, BeforeValidator(_whole)]


class _Hello(BaseModel):
    model_config = _MODEL

    ok: bool
    name: str = "exec"
    max_pps: Annotated[float, Field(gt=0)] | None = None
    virtual_time: bool = False
    can_abort: bool = True
    min_trial_s: Annotated[float, Field(ge=0)] = 0.0


class _Pair(BaseModel):
    model_config = _MODEL

    tx_packets: Count
    rx_packets: Count


class _Answer(_Pair):
    """Counters may be negative here: that is for the judgement of the trial."""

    elapsed_s: float
    aborted: bool = False
    tx_shortfall: Count = 0
    rx_errors: Count = 0
    queue_drops: Count = 0
    queue_full: Count = 0
    in_flight_packets: Count = 0
    elapsed_uncertainty_s: float = 0.0
    settled: bool = True
    directions: tuple[_Pair, ...] = ()
    evidence: dict[str, float] = {}


Model = TypeVar("Model", bound=BaseModel)


class ExecGenerator(Generator):
    """A program of the user's. ``answer_s`` is what it gets beyond the time its trials take."""

    def __init__(self, command: str, answer_s: float = 60.0) -> None:
        """Raises: UnusableInput, GeneratorError."""
        self._answer_s = answer_s
        self._stderr: IO[bytes] = tempfile.TemporaryFile()
        self._buffer = bytearray()
        self._process = self._start(_arguments(command))
        try:
            hello = self._ask({"op": "hello", "version": 1}, answer_s, _Hello)
            if not hello.ok:
                raise self._error("it does not want to start: its hello says ok: false")
        except BaseException:
            self.close()
            raise
        self._info = GeneratorInfo(
            hello.name, hello.max_pps or math.inf, hello.virtual_time, hello.can_abort,
            hello.min_trial_s,
        )  # fmt: skip

    @property
    def info(self) -> GeneratorInfo:
        return self._info

    def run(self, request: TrialRequest) -> Measurement:
        question = {
            "op": "trial", "rate_pps": request.rate_pps, "duration_s": request.duration_s,
            "frame_size": request.frame_size, "flows": request.flows,
            "abort_on_loss": request.abort_on_loss,
        }  # fmt: skip
        takes = 0.0 if self._info.virtual_time else request.duration_s
        answer = self._ask(question, takes + self._answer_s, _Answer)
        return Measurement(
            **{
                **dict(answer),
                "directions": tuple(Direction(**dict(pair)) for pair in answer.directions),
            }
        )

    def close(self) -> None:
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
        # And what it may have started: the group is its own.
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
        if not self._stderr.closed:
            self._stderr.close()

    def _start(self, arguments: list[str]) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                arguments,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            self._stderr.close()
            raise UnusableInput("--exec-cmd", f"{arguments[0]}: {error.strerror}") from error

    def _ask(self, question: dict[str, Any], seconds: float, model: type[Model]) -> Model:
        deadline = time.monotonic() + seconds
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
        except OSError as error:
            raise self._error("it has closed its standard input") from error
        line = self._read_line(deadline, seconds)
        try:
            answer = json.loads(line)
        except ValueError as error:
            raise self._error(f"its answer is no JSON: {line[:200]!r}") from error
        if isinstance(answer, dict) and answer.get("error"):
            raise self._error(f"it says: {answer['error']}")
        try:
            return model.model_validate(answer)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the answer"
            raise self._error(f"{where}: {first['msg']} (in {line[:200]!r})") from error

    def _read_line(self, deadline: float, seconds: float) -> bytes:
        """One line before the deadline; what follows it is kept for the next."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while (end := self._buffer.find(b"\n")) < 0:
                if len(self._buffer) > _LONGEST_LINE:
                    raise self._error("its answer is longer than a line may be")
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise self._error(f"no answer within {seconds:g} s")
                read = os.read(descriptor, 65536)
                if not read:
                    raise self._error(self._how_it_ended())
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

    def _error(self, what: str) -> GeneratorError:
        """With the last lines the program wrote to its standard error."""
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, self._stderr.tell() - 2000))
        said = self._stderr.read().decode(errors="replace").strip()
        return GeneratorError(f"--exec-cmd: {what}" + (f"\nIt wrote:\n{said}" if said else ""))


def _arguments(command: str) -> list[str]:
    try:
        arguments = shlex.split(command)
    except ValueError as error:
        raise UnusableInput("--exec-cmd", f"{error}: {command!r}") from error
    if not arguments:
        raise UnusableInput("--exec-cmd", "it is empty")
    return arguments

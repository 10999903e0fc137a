"""The generator ``exec``: any program that speaks JSON lines, as docs/zeroloss/generators.md has them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, TypeAdapter

from netplugin_zeroloss.generators.contract import (
    LATE_PART,
    Generator,
    GeneratorDescription,
    GeneratorInfo,
    Positive,
)
from netplugin_zeroloss.generators.dialogue import Dialogue
from netplugin_zeroloss.values import Measurement, TrialRequest, UnusableInput


class Exec(GeneratorDescription):
    """A program that speaks JSON lines. The command is quoted as in a shell; no shell is started."""

    type: Literal["exec"] = "exec"
    command: str
    #: Seconds allowed for an answer, in addition to the trial duration.
    answer_timeout_s: Positive = 60.0


@dataclass(frozen=True, slots=True)
class _Hello(GeneratorInfo):
    name: str = "exec"
    ok: bool = field(kw_only=True)


def _completed(hello: Any) -> Any:
    """Leave out what is null; a generator of bursts has also those of a mix, unless it says otherwise."""
    if not isinstance(hello, dict):
        return hello
    said = {name: value for name, value in hello.items() if value is not None}
    return {"bursts_of_mixes": said.get("bursts", False)} | said


# What the protocol does not know in an answer is ignored.
_HELLO: Final[TypeAdapter[_Hello]] = TypeAdapter(Annotated[_Hello, BeforeValidator(_completed)])
_MEASUREMENT: Final = TypeAdapter(Measurement)


class ExecGenerator(Generator):
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
        takes = 0.0 if self._info.virtual_time else request.duration_s * (1 + LATE_PART)
        return self._dialogue.ask(question, takes + self._answer_s, _MEASUREMENT)


def _arguments(command: str) -> list[str]:
    try:
        arguments = shlex.split(command)
    except ValueError as error:
        raise UnusableInput("--exec-cmd", f"its quotes are not closed: {command!r}") from error
    if not arguments:
        raise UnusableInput("--exec-cmd", "it is empty")
    return arguments

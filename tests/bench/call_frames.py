"""Which functions of the source tree run: frames of a profiled call, and the files they are in."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[2]


def file_of(frame: FrameType, parts: tuple[str, ...]) -> str | None:
    """Return the file of a function, if it is below one of ``parts`` of the source tree."""
    file = Path(frame.f_code.co_filename)
    if not any(file.is_relative_to(ROOT / part) for part in parts):
        return None
    return str(file.relative_to(ROOT))


def stack(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and those that wait for it, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_body(frame: FrameType) -> bool:
    """Whether it is the body of a module or of a class, which runs when a module is imported."""
    return not frame.f_code.co_flags & inspect.CO_OPTIMIZED

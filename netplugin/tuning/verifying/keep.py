"""Store runs in a directory, one file each; files are written atomically and found by label or name."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import ValidationError

from netplugin.errors import HostError, InvalidRequest, NotFound
from netplugin.tuning.verifying.result import Run

FOLDER = Path("/var/lib/netplugin/verify")
STEP = "results"


def prepare(folder: Path) -> None:
    """Check before measuring that results can be written. Raises: HostError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".{os.getpid()}.new"
        probe.touch()
        probe.unlink()
    except OSError as wrong:
        raise HostError(
            f"{folder} cannot be written: {wrong.strerror}", step=STEP,
            fix="run it as root, or name another folder: --results DIR",
        ) from wrong  # fmt: skip


def write(folder: Path, run: Run) -> Path:
    """Write a run to a new file atomically. Raises: HostError."""
    path = folder / f"{run.started:%Y%m%dT%H%M%S}-{run.label}.json"
    fresh = folder / f".{os.getpid()}.new"
    try:
        with fresh.open("x") as file:
            file.write(run.model_dump_json(indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        fresh.rename(path)
    except OSError as wrong:
        fresh.unlink(missing_ok=True)
        raise HostError(f"{path} cannot be written: {wrong.strerror}", step=STEP) from wrong
    return path


def find(folder: Path, name: str) -> Path:
    """Find a run by file path, or the newest with a label. Raises: NotFound."""
    if "/" in name or name.endswith(".json"):
        for path in (Path(name), folder / name):
            if path.is_file():
                return path
        raise NotFound(f"there is no file {name}", step=STEP, fix="name a label, or a file")
    files = sorted(folder.glob("[0-9]*-*.json")) if folder.is_dir() else []
    labels = {path: path.stem.partition("-")[2] for path in files}
    of_label = [path for path, label in labels.items() if label == name]
    if not of_label:
        have = ", ".join(sorted(set(labels.values()))) or "none"
        raise NotFound(
            f"no run in {folder} has the label {name}; there are: {have}", step=STEP,
            fix="measure one with --label, or name the folder: --results DIR",
        )  # fmt: skip
    return of_label[-1]


def read(path: Path) -> Run:
    """Read a run. Raises: InvalidRequest."""
    try:
        return Run.model_validate_json(path.read_text())
    except OSError as wrong:
        why = wrong.strerror or str(wrong)
    except ValidationError as wrong:
        first = wrong.errors()[0]
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
    except UnicodeDecodeError:
        why = "it is not text"
    raise InvalidRequest(f"{path} cannot be read as a run: {why}", step=STEP)

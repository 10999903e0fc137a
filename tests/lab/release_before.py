"""The release before this one: its wheel, built from the history, and how its programs are started.

It is the newest tag before this commit. While there is none, it is the last commit whose store has another
version than today's. ``NETPLUGIN_WHEEL_BEFORE`` names a wheel to take instead, for a copy without history.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from tests.lab.processes import LabError, run

_ROOT = Path(__file__).parents[2]
_STORE = "agents/store/database.py"
_INSTEAD = "NETPLUGIN_WHEEL_BEFORE"
_BUILD_S = 120.0


@dataclass(frozen=True)
class ReleaseBefore:
    """``name`` is a tag, a commit or a wheel; ``directory`` has its modules."""

    name: str
    directory: Path

    @property
    def env(self) -> Mapping[str, str]:
        """With this, ``python -m`` runs its modules, on the dependencies that are installed here.

        They come before what is installed; neither the working directory nor the user's own do.
        """
        return {"PYTHONPATH": str(self.directory), "PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1"}

    def check(self) -> None:
        """Raises: LabError, if another version would run."""
        found = run([sys.executable, "-c", "import agents.main; print(agents.main.__file__)"], env=self.env)
        if not Path(found.strip()).is_relative_to(self.directory):
            raise LabError(f"{found.strip()} would run instead of {self.directory}")


def unpacked(directory: Path) -> ReleaseBefore:
    """Build its wheel below ``directory``, and unpack it there. Raises: LabError."""
    given = os.environ.get(_INSTEAD)
    name = given or _name()
    wheel = Path(given) if given else _built(name, directory)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory / "modules")
    release = ReleaseBefore(name, directory / "modules")
    release.check()
    return release


def _name() -> str:
    try:
        return _git("describe", "--tags", "--abbrev=0", "--match", "v[0-9]*", "HEAD^").decode().strip()
    except LabError:
        return _last_of_another_store()


def _last_of_another_store() -> str:
    """The commit before the one that gave the store its version. Raises: LabError."""
    if _git("rev-parse", "--is-shallow-repository").strip() == b"true":
        raise LabError(f"this clone has no whole history: git fetch --unshallow --tags, or set {_INSTEAD}")
    today = _store_version("HEAD")
    oldest = ""
    for commit in _git("log", "--first-parent", "--format=%H", "--", _STORE).decode().split():
        if _store_version(commit) != today:
            return f"{oldest}^"
        oldest = commit
    raise LabError(f"there is no tag, and no commit with another version of the store: set {_INSTEAD}")


def _store_version(commit: str) -> int:
    """How many migrations the store of a commit has; -1 if it has no such list."""
    for node in ast.parse(_git("show", f"{commit}:{_STORE}")).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "_MIGRATIONS":
            assert isinstance(node.value, ast.Tuple)
            return len(node.value.elts)
    return -1


def _built(name: str, directory: Path) -> Path:
    source, wheels = directory / "source", directory / "wheels"
    with zipfile.ZipFile(BytesIO(_git("archive", "--format=zip", name))) as archive:
        archive.extractall(source)
    quiet = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation"]
    run([sys.executable, "-m", "pip", "wheel", *quiet, "--wheel-dir", wheels, source], _BUILD_S)
    (wheel,) = wheels.glob("netplugin-*.whl")
    return wheel


def _git(*words: str) -> bytes:
    """Raises: LabError, also where there is no git or no history."""
    # As root in a checkout of somebody else, git would refuse (safe.directory in git-config(1)).
    command = ["git", "-C", str(_ROOT), "-c", "safe.directory=*", *words]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError as missing:
        raise LabError(
            f"the release before is built from git's history: install git, or set {_INSTEAD}"
        ) from missing
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip()
        raise LabError(f"git {' '.join(words)}: {said}; without its history, set {_INSTEAD}")
    return done.stdout

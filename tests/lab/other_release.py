"""Another release than this one, and how its programs are started.

It is the newest tag before this commit, or the wheel that ``NETPLUGIN_WHEEL_BEFORE`` names. While there is no
tag, it is one after this one: the same modules, with one migration of the store more.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from tests.lab.processes import LabError, run

_ROOT = Path(__file__).parents[2]
_PACKAGES = ("netplugin", "agents", "drivers")
_STORE = "agents/store/database.py"
_MIGRATIONS = "_MIGRATIONS: tuple[str, ...] = ("
_INSTEAD = "NETPLUGIN_WHEEL_BEFORE"
_BUILD_S = 120.0


@dataclass(frozen=True)
class OtherRelease:
    """``name`` is a tag, a wheel or what was changed; ``directory`` has its modules."""

    name: str
    directory: Path
    is_newer: bool = False

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


def unpacked(directory: Path) -> OtherRelease:
    """The modules of the other release, below ``directory``. Raises: LabError."""
    modules = directory / "modules"
    given = os.environ.get(_INSTEAD)
    if name := given or _tag():
        wheel = Path(name) if given else _built(name, directory)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(modules)
        release = OtherRelease(name, modules)
    else:
        release = _with_a_migration(modules)
    release.check()
    return release


def _with_a_migration(modules: Path) -> OtherRelease:
    for package in _PACKAGES:
        shutil.copytree(_ROOT / package, modules / package, ignore=shutil.ignore_patterns("__pycache__"))
    store = modules / _STORE
    before, found, after = store.read_text().partition(_MIGRATIONS)
    if not found:
        raise LabError(f"{_STORE} has no list of migrations that begins with {_MIGRATIONS}")
    migration = '"CREATE TABLE of_the_next_release (x);",'
    end = after.index("\n)\n")
    store.write_text(f"{before}{found}{after[:end]}{migration}{after[end:]}")
    return OtherRelease("this one with a migration more", modules, is_newer=True)


def _tag() -> str:
    """The newest tag before this commit; empty without one, or without history."""
    try:
        return _git("describe", "--tags", "--abbrev=0", "--match", "v[0-9]*", "HEAD^").decode().strip()
    except LabError:
        return ""


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
        raise LabError(f"there is no git: install it, or set {_INSTEAD}") from missing
    if done.returncode != 0:
        printed = done.stderr.decode(errors="replace").strip()
        raise LabError(f"git {' '.join(words)}: {printed}; without its history, set {_INSTEAD}")
    return done.stdout

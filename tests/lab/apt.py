"""apt with the machine's sources and settings, but lists and archives of its own.

It fetches packages and unpacks them; the machine's own apt and its packages stay as they are.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.lab.processes import LabError, run

FETCH_TIMEOUT_S = 600.0
SOURCE_PARTS = Path("/etc/apt/sources.list.d")
DEBIAN_KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
ALONE = """\
Dir::Etc::sourcelist "/dev/null";
Dir::State::status "/dev/null";
// Of what is only unpacked nobody reads a description.
Acquire::Languages "none";
"""
TARGETS = ("--format", "$(REPO_URI)", "Created-By: Packages", "Component: main")


class PrivateApt:
    """Keeps all it has in one directory, which is the caller's to remove."""

    def __init__(self, directory: Path, only: str | None = None) -> None:
        """``only``: sources that replace the machine's own; no package counts as installed then."""
        self._directory = directory
        self._parts = directory / "sources.list.d"
        self._parts.mkdir(parents=True)
        if only is not None:
            (self._parts / "only.list").write_text(only)
        elif SOURCE_PARTS.is_dir():
            shutil.copytree(SOURCE_PARTS, self._parts, dirs_exist_ok=True)
        lists, cache = directory / "lists", directory / "cache"
        for place in (lists, cache):
            (place / "partial").mkdir(parents=True)
        self._settings = directory / "apt.conf"
        # With -c it is read after the machine's own settings, and so adds to them.
        self._settings.write_text(settings(lists, cache, self._parts) + (ALONE if only is not None else ""))

    def update(self) -> None:
        self._run("apt-get", "--quiet", "update")

    def add_suite(self, release: str, suite: str) -> None:
        """Have one more of Debian's suites, from the mirror that the machine has `release` of."""
        if self._mirrors(suite):
            return
        (self._parts / f"{suite}.list").write_text(self.sources(release, suite))
        self.update()

    def alone(self, release: str, suite: str) -> PrivateApt:
        """An apt that knows one suite alone, from the mirror that the machine has `release` of."""
        apt = PrivateApt(self._directory / suite, self.sources(release, suite))
        apt.update()
        return apt

    def sources(self, release: str, suite: str) -> str:
        """A sources.list with a suite, from the mirror that the machine has `release` of."""
        mirrors = self._mirrors(release)
        if not mirrors:
            raise LabError(f"apt's sources have no Debian mirror of {release}")
        return sources(mirrors, suite)

    def candidate(self, package: str, suite: str | None = None) -> str:
        """The version that would be installed, from a certain suite if there is one."""
        preferred = ("--target-release", suite) if suite else ()
        policy = self._run("apt-cache", *preferred, "policy", package)
        version = re.search(r"Candidate: (\d\S*)", policy)
        if version is None:
            raise LabError(f"apt has no candidate for {package}:\n{policy}")
        return version[1]

    def kernel_image(self, metapackage: str) -> str:
        """The kernel that a package without content stands for."""
        shown = self._run("apt-cache", "depends", metapackage)
        needed = re.search(r"Depends: (linux-image-\S+)", shown)
        if needed is None:
            raise LabError(f"{metapackage} depends on no kernel image:\n{shown}")
        return needed[1]

    def missing(self, *packages: str, suite: str) -> list[Missing]:
        """What the machine would have to install or upgrade to have packages of a suite."""
        planned = self._run(
            *("apt-get", "--simulate", "--no-install-recommends", "--no-remove"),
            *("--target-release", suite, "install", *packages),
        )
        return parse_plan(planned)

    def unpack(self, packages: Iterable[str], target: Path) -> None:
        """Download packages (as `name`, `name=version` or `name/suite`) and unpack all into one directory."""
        archives = self._directory / "archives"
        archives.mkdir()
        self._run("apt-get", "--quiet", "download", *packages, cwd=archives)
        for archive in sorted(archives.glob("*.deb")):
            run(["dpkg", "-x", archive, target], FETCH_TIMEOUT_S)
        shutil.rmtree(archives)

    def _mirrors(self, codename: str) -> list[str]:
        """Where apt gets a suite of Debian's from, whatever its sources look like."""
        origin = "Debian Backports" if codename.endswith("-backports") else "Debian"
        named = (f"Codename: {codename}", f"Origin: {origin}")
        found = self._run("apt-get", "indextargets", *TARGETS, *named).split()
        return list(dict.fromkeys(found))

    def _run(self, program: str, *words: str, cwd: Path | None = None) -> str:
        return run([program, "-c", self._settings, *words], FETCH_TIMEOUT_S, cwd=cwd)


@dataclass(frozen=True, slots=True)
class Missing:
    """A package and the version that would be installed."""

    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name}={self.version}"


def settings(lists: Path, cache: Path, parts: Path) -> str:
    return f"""\
Dir::State::lists "{lists}";
Dir::Cache "{cache}";
Dir::Etc::sourceparts "{parts}";
// The `_apt` user may not be able to reach them; what is fetched is verified anyway.
APT::Sandbox::User "root";
// What the machine does after an update of its own lists.
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
"""


def sources(mirrors: Iterable[str], suite: str) -> str:
    """A sources.list with one suite of Debian's."""
    return "".join(f"deb [signed-by={DEBIAN_KEYS}] {uri} {suite} main\n" for uri in mirrors)


def parse_plan(planned: str) -> list[Missing]:
    """The packages of `apt-get --simulate install`: `Inst name [old version] (version ...)`."""
    lines = re.finditer(r"^Inst (\S+) (?:\[\S+\] )?\((\S+) ", planned, re.MULTILINE)
    return [Missing(line[1], line[2]) for line in lines]

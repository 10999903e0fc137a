"""Build what is released, from a checkout: ``make dist``, or ``python -m tools.dist``.

Only the download uses the network: what it gets is kept in .lab, and compared with the hashes of
requirements/agent.txt at each build. The same commit gives the same bytes; its time is SOURCE_DATE_EPOCH.
"""

from __future__ import annotations

import argparse
import configparser
import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path

from tools.dist.layout import fits, lay_out
from tools.dist.packages import Package

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "requirements/agent.txt"
BUILD, CACHE = ROOT / "build/dist", ROOT / ".lab"
PYTHONS = ("3.11", "3.12", "3.13")
PARTS = {"deb12": "3.11", "deb13": "3.13", "rpm": "3.11", "archive": ""}
# Versions of glibc that wheels are built for; EL 9 and openEuler 22.03 have 2.34, Debian 12 has 2.36.
_GLIBC = ("_2_28", "_2_27", "_2_26", "_2_24", "_2_17", "2014")
# libvirt is asked by the platform's own Python: this one would be compiled on the host.
_ABSENT = "libvirt-python"
# Published as source only. Without a compiler it leaves its parser in C out, and is for every Python.
_SOURCE = "ovs"
_PIN = re.compile(r"^(\S+)==\S+ \\\n(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+", re.M)
_BACKEND = "import sys; from setuptools import build_meta as b; getattr(b, sys.argv[1])(sys.argv[2])"


def run(*command: str | Path, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> str:
    program, settings = list(map(str, command)), {**os.environ, **(env or {})}
    return subprocess.check_output(program, cwd=cwd, env=settings, text=True)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def sums(paths: Iterable[Path]) -> str:
    return "".join(f"{sha256(path)}  {path.name}\n" for path in sorted(paths))


def fetch() -> Path:
    """The directory of what the lock file pins, downloaded if it is not there yet."""
    pins = {pin[1]: pin[0] for pin in _PIN.finditer(LOCK.read_text()) if pin[1] != _ABSENT}
    lock = "".join(pins[name] for name in sorted(pins) if name != _SOURCE)
    key = hashlib.sha256(f"{lock}{pins[_SOURCE]}{PYTHONS}{_GLIBC}".encode()).hexdigest()
    kept = CACHE / f"dist-{key[:12]}"
    if not kept.is_dir():
        draft, wheels, source = BUILD / "download", BUILD / "wheels.txt", BUILD / "source.txt"
        wheels.write_text(lock)
        source.write_text(pins[_SOURCE])
        pip = [sys.executable, *"-m pip download -q --no-deps --require-hashes".split(), f"--dest={draft}"]
        platforms = [f"--platform=manylinux{version}_x86_64" for version in _GLIBC]
        for python in PYTHONS:
            run(*pip, "--only-binary=:all:", f"--python-version={python}", *platforms, "-r", wheels)
        # pip reads what a source needs, which takes what it is built with.
        run(*pip, "--no-binary=:all:", "--no-build-isolation", "-r", source, env=setuptools(draft))
        CACHE.mkdir(exist_ok=True)
        draft.rename(kept)
    if changed := [path.name for path in kept.iterdir() if sha256(path) not in "".join(pins.values())]:
        raise SystemExit(f"{kept}: {', '.join(changed)} is not what {LOCK.name} has; remove that directory")
    return kept


def setuptools(downloaded: Path) -> dict[str, str]:
    """The environment in which the pinned setuptools build."""
    target = BUILD / "setuptools"
    if not target.is_dir():
        shutil.unpack_archive(next(downloaded.glob("setuptools-*.whl")), target, "zip")
    return {"PYTHONPATH": str(target), "CC": "/bin/false"}


def export(target: Path) -> None:
    """Copy the files of the working tree that git knows, with modes that do not depend on the umask."""
    for name in filter(None, run("git", "ls-files", "-z").split("\0")):
        source, copy = ROOT / name, target / name
        if source.is_file():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy)
            copy.chmod(0o755 if os.access(source, os.X_OK) else 0o644)


def build(source: Path, downloaded: Path, out: Path, epoch: int) -> list[Path]:
    """Put our sdists and wheels into ``out``. Returns all wheels that the agent needs."""
    sdists, wheels, others = (BUILD / name for name in ("sdists", "wheels", "others"))
    sdists.mkdir()
    wheels.mkdir()
    shutil.unpack_archive(next(downloaded.glob("*.tar.gz")), others)
    for project in (source, source / "tools/trex", *others.iterdir()):
        for step, target in (("build_sdist", sdists), ("build_wheel", wheels)):
            run(sys.executable, "-c", _BACKEND, step, target, cwd=project, env=setuptools(downloaded))
    for sdist in list(sdists.glob("netplugin*.tar.gz")):
        shutil.unpack_archive(sdist, sdists)
        pack(sdists / sdist.name.removesuffix(".tar.gz"), out, epoch)
    for wheel in wheels.glob("netplugin*.whl"):
        shutil.copy(wheel, out)
    needed = [wheel for wheel in wheels.iterdir() if not wheel.name.startswith("netplugin_zeroloss-")]
    return sorted([*needed, *downloaded.glob("*.whl")], key=lambda path: path.name)


def pack(folder: Path, out: Path, epoch: int) -> None:
    """Write a folder's .tar.gz, which depends on names, modes and contents alone."""

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.mtime, info.uid, info.gid, info.uname, info.gname = epoch, 0, 0, "root", "root"
        return info

    with (
        (out / f"{folder.name}.tar.gz").open("wb") as file,
        gzip.GzipFile("", "wb", 1, fileobj=file, mtime=epoch) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for path in (folder, *sorted(folder.rglob("*"))):
            tar.add(path, path.relative_to(folder.parent), recursive=False, filter=plain)


def components(site: Path, version: str) -> str:
    """What the packages carry, as CycloneDX 1.5 (https://cyclonedx.org/docs/1.5/json/)."""
    found: dict[str, object] = {}
    for one in distributions(path=[str(site)]):
        name, licence = one.metadata["Name"], one.metadata["License-Expression"] or one.metadata["License"]
        url = f"pkg:pypi/{re.sub('[-_.]+', '-', name).lower()}@{one.version}"
        # Some have the whole text of the licence there.
        licences = [{"license": {"name": licence}}] if licence and "\n" not in licence else []
        known = {"type": "library", "name": name, "version": one.version, "purl": url, "bom-ref": url}
        found[url] = known | {"licenses": licences}
    subject = {"component": {"type": "application", "name": "netplugin", "version": version}}
    form = {"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1, "metadata": subject}
    return json.dumps({**form, "components": [found[url] for url in sorted(found)]}, indent=1) + "\n"


def archive(wheels: Sequence[Path], package: Package) -> None:
    """The wheels for each Python, the files of the host, and the program that installs them."""
    folder = BUILD / f"netplugin-{package.version}-linux-x86_64"
    (folder / "wheels").mkdir(parents=True)
    for wheel in wheels:
        shutil.copy(wheel, folder / "wheels")
    (folder / "wheels/SHA256SUMS").write_text(sums(wheels))
    shutil.copytree(package.host_files, folder / "root", symlinks=True)
    for name in ("layout.py", "install.sh"):
        shutil.copy(package.source / "tools/dist" / name, folder)
    (folder / "scripts.sh").write_text(package.scripts)
    pack(folder, package.out, package.epoch)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.dist", description="Build the packages.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="default: %(default)s; emptied first")
    parser.add_argument("--only", choices=PARTS, action="append", help="default: all")
    parser.add_argument("--sign", metavar="KEY", help="the key of gpg that signs the checksums")
    arguments = parser.parse_args()
    out, source = arguments.out.resolve(), BUILD / "source"
    os.umask(0o022)
    for directory in (BUILD, out):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
    downloaded = fetch()
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH") or run("git", "log", "-1", "--format=%ct"))
    os.environ.update(SOURCE_DATE_EPOCH=str(epoch), LC_ALL="C.UTF-8", TZ="UTC", PYTHONHASHSEED="0")
    export(source)
    wheels = build(source, downloaded, out, epoch)
    setup = configparser.ConfigParser()
    setup.read(source / "setup.cfg")
    own = f"3.{sys.version_info[1]}"
    for python in {"3.11", "3.13", own}:
        lay_out([wheel for wheel in wheels if fits(wheel, python)], BUILD / python, python)
    site = BUILD / own / f"opt/netplugin/lib/python{own}/site-packages"
    version, ours = setup["metadata"]["version"], {"PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
    known = run(sys.executable, "-c", "from agents.store import database as d; print(d._VERSION)", env=ours)
    scripts = f"set -e\nSTORE_VERSION={known}\n{(source / 'tools/dist/scripts.sh').read_text()}"
    package = Package(source, BUILD, BUILD / "host", out, version, epoch, scripts)
    sbom = components(site, version)
    (out / f"netplugin-{version}.cdx.json").write_text(sbom)
    if (source / "tools/dist/man.py").exists():
        run(sys.executable, "-m", "tools.dist.man", package.host_files, cwd=source, env=ours)
    package.lay_out_host_files(sbom)
    for part, python in PARTS.items():
        if part in (arguments.only or PARTS):
            if part == "archive":
                archive(wheels, package)
            else:
                (package.rpm if part == "rpm" else package.deb)(BUILD / python, python, part)
    (out / "SHA256SUMS").write_text(sums(out.iterdir()))
    if arguments.sign:
        run("gpg", "--batch", "--local-user", arguments.sign, "--armor", "--detach-sign", out / "SHA256SUMS")
    print((out / "SHA256SUMS").read_text(), end="")


if __name__ == "__main__":
    main()

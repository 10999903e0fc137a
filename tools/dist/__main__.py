"""Build what is released, from a checkout: ``make dist``, or ``python -m tools.dist``.

Wheels and sdists, a deb for each Debian, an rpm, the archive for hosts without an index, the components (SBOM), and
the checksums of all. Only the download uses the network; what it gets is kept in .lab and compared with the hashes
of requirements/agent.txt at each build. The same commit gives the same bytes (SOURCE_DATE_EPOCH is its time).
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
from collections.abc import Iterable, Sequence
from importlib.metadata import distributions
from pathlib import Path

from tools.dist import packages
from tools.dist.layout import fits, lay_out

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "requirements/agent.txt"
BUILD, CACHE = ROOT / "build/dist", ROOT / ".lab"
PYTHONS = ("3.11", "3.12", "3.13")
#: glibc's versions that wheels are made for, up to 2.28: EL 9 and openEuler 22.03 have 2.34, Debian 12 has 2.36.
_PLATFORMS = (
    "manylinux_2_28",
    "manylinux_2_27",
    "manylinux_2_26",
    "manylinux_2_24",
    "manylinux_2_17",
    "manylinux2014",
)
# libvirt is asked by the platform's own Python; it would be compiled on the host.
_ABSENT = ("libvirt-python",)
# Published as source only.
_SOURCES = ("ovs",)
_PIN = re.compile(r"^(\S+)==(\S+) \\\n(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+", re.M)


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> None:
    """Its standard output is left out, its errors are not."""
    program = list(map(str, command))
    subprocess.run(program, check=True, cwd=cwd, env={**os.environ, **environment}, stdout=subprocess.DEVNULL)


def fetch() -> Path:
    """The directory of what is downloaded for the lock file; filled if it is not there yet."""
    pins = {pin[1]: pin[0] for pin in _PIN.finditer(LOCK.read_text()) if pin[1] not in _ABSENT}
    wanted = (
        CACHE
        / f"dist-{hashlib.sha256(repr((sorted(pins.items()), PYTHONS, _PLATFORMS)).encode()).hexdigest()[:12]}"
    )
    if not wanted.is_dir():
        draft = BUILD / "download"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--require-hashes", "-d", draft]
        (draft / "lock").write_text("".join(pins[name] for name in sorted(pins.keys() - set(_SOURCES))))
        platforms = [f"--platform={name}_x86_64" for name in _PLATFORMS]
        for python in PYTHONS:
            run(*pip, "--only-binary=:all:", f"--python-version={python}", *platforms, "-r", draft / "lock")
        # Of a source pip reads what it needs, which takes what it is built with.
        setuptools = _setuptools(draft)
        for name in _SOURCES:
            (draft / "lock").write_text(pins[name])
            run(*pip, "--no-binary=:all:", "--no-build-isolation", "-r", draft / "lock", **setuptools)
        (draft / "lock").unlink()
        CACHE.mkdir(exist_ok=True)
        draft.rename(wanted)
    known = set(re.findall(r"sha256:([0-9a-f]{64})", "".join(pins.values())))
    if changed := [path.name for path in wanted.iterdir() if sha256(path) not in known]:
        raise SystemExit(f"{wanted}: {', '.join(changed)} is not what {LOCK.name} has; remove the directory")
    return wanted


def _setuptools(downloaded: Path) -> dict[str, str]:
    """The environment in which the pinned setuptools build."""
    target = BUILD / "setuptools"
    if not target.is_dir():
        run(sys.executable, "-m", "zipfile", "-e", next(downloaded.glob("setuptools-*.whl")), target)
    # Without a compiler ovs leaves its parser in C out: its wheel is for every Python.
    return {"PYTHONPATH": str(target), "CC": "/bin/false"}


def export(target: Path) -> None:
    """Copy what git knows of the working tree, with the modes that git knows and not the umask's."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    for name in filter(None, listed.split("\0")):
        source = ROOT / name
        if source.is_file() and not source.is_symlink():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target / name)
            (target / name).chmod(0o755 if os.access(source, os.X_OK) else 0o644)


def build_wheels(source: Path, downloaded: Path, out: Path, epoch: int) -> list[Path]:
    """Wheels and sdists of the two distributions in ``out``; all wheels that the agent needs are returned."""
    environment = _setuptools(downloaded)
    build = [
        sys.executable,
        "-c",
        "import sys; from setuptools import build_meta as b; getattr(b, sys.argv[1])(sys.argv[2])",
    ]
    made, drafts = BUILD / "wheels", BUILD / "sdists"
    for directory in (made, drafts):
        directory.mkdir()
    for sdist in downloaded.glob("*.tar.gz"):
        shutil.unpack_archive(sdist, BUILD / "sources")
    for project in (source, source / "tools/trex"):
        run(*build, "build_sdist", drafts, cwd=project, **environment)
    for draft in list(drafts.iterdir()):
        shutil.unpack_archive(draft, drafts)
        pack(drafts / draft.name.removesuffix(".tar.gz"), out / draft.name, epoch)
    for project in (*(BUILD / "sources").iterdir(), source, source / "tools/trex"):
        run(*build, "build_wheel", made, cwd=project, **environment)
    for wheel in made.glob("netplugin*.whl"):
        shutil.copy(wheel, out)
    ours = [wheel for wheel in made.glob("*.whl") if not wheel.name.startswith("netplugin_zeroloss")]
    return sorted([*ours, *downloaded.glob("*.whl")], key=lambda path: path.name)


def pack(folder: Path, target: Path, epoch: int) -> None:
    """A tar of a folder that depends on names, modes and contents alone."""

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.mtime, info.uid, info.gid, info.uname, info.gname = epoch, 0, 0, "root", "root"
        return info

    with (
        target.open("wb") as file,
        gzip.GzipFile("", "wb", fileobj=file, mtime=epoch) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for path in (folder, *sorted(folder.rglob("*"))):
            tar.add(path, path.relative_to(folder.parent), recursive=False, filter=plain)


def components(site: Path, version: str) -> str:
    """CycloneDX 1.5 (https://cyclonedx.org/docs/1.5/json/) of what the packages carry."""
    found = []
    for one in distributions(path=[str(site)]):
        name, licence = one.metadata["Name"], one.metadata["License-Expression"] or one.metadata["License"]
        purl = f"pkg:pypi/{re.sub('[-_.]+', '-', name).lower()}@{one.version}"
        # Some have all of the licence's text there.
        licences = [{"license": {"name": licence}}] if licence and "\n" not in licence else []
        found.append(
            {
                "type": "library",
                "bom-ref": purl,
                "name": name,
                "version": one.version,
                "purl": purl,
                "licenses": licences,
            }
        )
    subject = {"type": "application", "bom-ref": "netplugin", "name": "netplugin", "version": version}
    found.sort(key=lambda component: component["purl"])
    made = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": subject},
        "components": found,
    }
    return json.dumps(made, indent=1) + "\n"


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def sums(paths: Iterable[Path]) -> str:
    return "".join(f"{sha256(path)}  {path.name}\n" for path in sorted(paths))


def archive(wheels: Sequence[Path], package: packages.Package, epoch: int) -> None:
    """The archive for other Linuxes: wheels for each Python, the files of the host, and the program that installs them."""
    folder = BUILD / f"netplugin-{package.version}-linux-x86_64"
    (folder / "wheels").mkdir(parents=True)
    for wheel in wheels:
        shutil.copy(wheel, folder / "wheels")
    (folder / "wheels/SHA256SUMS").write_text(sums((folder / "wheels").iterdir()))
    shutil.copytree(package.host_files, folder / "root")
    shutil.copy(package.source / "tools/dist/layout.py", folder)
    (folder / "scripts.sh").write_text(package.scripts)
    shutil.copyfile(package.source / "tools/dist/install.sh", folder / "install.sh")
    (folder / "install.sh").chmod(0o755)
    pack(folder, package.out / f"{folder.name}.tar.gz", epoch)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.dist", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="default: %(default)s; emptied first")
    parser.add_argument("--revision", default="1", help="of the deb and the rpm (default: %(default)s)")
    parser.add_argument(
        "--only", choices=("deb12", "deb13", "rpm", "archive"), action="append", help="default: all"
    )
    parser.add_argument("--sign", metavar="KEY", help="the key of gpg that signs the checksums")
    parser.add_argument("--fetch", action="store_true", help="download only")
    arguments = parser.parse_args()
    only, out = arguments.only or ("deb12", "deb13", "rpm", "archive"), arguments.out.resolve()
    os.umask(0o022)
    downloaded = fetch()
    if arguments.fetch:
        return
    commit = ["git", "log", "-1", "--format=%ct"]
    epoch = (
        os.environ.get("SOURCE_DATE_EPOCH")
        or subprocess.run(commit, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    )
    os.environ.update(SOURCE_DATE_EPOCH=epoch.strip(), LC_ALL="C.UTF-8", TZ="UTC", PYTHONHASHSEED="0")
    for directory in (BUILD, out):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
    source = BUILD / "source"
    export(source)
    setup = configparser.ConfigParser()
    setup.read(source / "setup.cfg")
    wheels = build_wheels(source, downloaded, out, int(epoch))
    trees = {}
    for python in ("3.11", "3.13"):
        trees[python] = BUILD / f"root-{python}"
        lay_out([wheel for wheel in wheels if fits(wheel, python)], trees[python], python)
    version = setup["metadata"]["version"]
    sbom = components(trees["3.11"] / "opt/netplugin/lib/python3.11/site-packages", version)
    (out / f"netplugin-{version}.cdx.json").write_text(sbom)
    package = packages.Package(
        source, BUILD, out, version, arguments.revision, setup["metadata"]["description"], int(epoch)
    )
    package.lay_out_host_files(sbom)
    for name, python in (("deb12", "3.11"), ("deb13", "3.13")):
        if name in only:
            package.deb(trees[python], python, name)
    if "rpm" in only:
        package.rpm(trees["3.11"], "3.11")
    if "archive" in only:
        archive(wheels, package, int(epoch))
    (out / "SHA256SUMS").write_text(sums(out.iterdir()))
    if arguments.sign:
        run("gpg", "--batch", "--local-user", arguments.sign, "--armor", "--detach-sign", out / "SHA256SUMS")
    print((out / "SHA256SUMS").read_text(), end="")


if __name__ == "__main__":
    main()

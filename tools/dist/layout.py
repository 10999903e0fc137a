"""Lay out a virtualenv from wheels, without pip: in the tree of a package, and by install.sh on a host.

``python layout.py ROOT WHEELS`` puts the wheels that fit this Python into ROOT/opt/netplugin.
"""

from __future__ import annotations

import configparser
import re
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

PREFIX = "/opt/netplugin"
# Options of Python. -I: neither the caller's environment nor folder says what is imported. -B: bytecode is
# the installation's, which removes it too. The unit sets variables of Python, so -I is not for the agent.
_OPTIONS = {"netplugin-agent": "-sPB"}
_SCRIPT = """\
#!{prefix}/bin/python {options}
import sys

from {module} import {function}

sys.exit({function}())
"""


def lay_out(wheels: Iterable[Path], root: Path, python: str, home: str = "/usr/bin") -> None:
    """Fill ROOT/opt/netplugin for the Python of this version in ``home``; its files name /opt/netplugin.

    Raises: ValueError for a wheel with files that belong elsewhere, FileExistsError if two have the same.
    """
    prefix = root / PREFIX.lstrip("/")
    site = prefix / f"lib/python{python}/site-packages"
    (prefix / "bin").mkdir(parents=True)
    (prefix / "bin/python").symlink_to(f"{home}/python{python}")
    (prefix / "bin/python3").symlink_to("python")
    settings = f"home = {home}\ninclude-system-site-packages = false\nversion = {python}\n"
    (prefix / "pyvenv.cfg").write_text(settings)
    for wheel in wheels:
        _unpack(wheel, site)
    commands = configparser.ConfigParser()
    commands.read(next(site.glob("netplugin-*.dist-info")) / "entry_points.txt")
    for name, target in commands["console_scripts"].items():
        module, function = target.split(":")
        path, options = prefix / "bin" / name, _OPTIONS.get(name, "-IB")
        path.write_text(_SCRIPT.format(prefix=PREFIX, options=options, module=module, function=function))
        path.chmod(0o755)


def fits(wheel: Path, python: str) -> bool:
    """Whether a wheel of this platform is for this Python (PEP 425)."""
    tag, abi, _ = wheel.stem.split("-")[-3:]
    return abi in ("none", "abi3") or f"cp{python.replace('.', '')}" in tag.split(".")


def _unpack(wheel: Path, site: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        for info in packed.infolist():
            inner = re.match(r"[^/]+\.data/([^/]+)/", info.filename)
            if info.is_dir() or (inner and inner[1] == "scripts"):  # commands of other projects
                continue
            target = site / info.filename
            if inner or ".." in target.parts:
                raise ValueError(f"{wheel.name}: {info.filename} belongs elsewhere")
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("xb") as file:
                file.write(packed.read(info))


if __name__ == "__main__":
    own = f"{sys.version_info[0]}.{sys.version_info[1]}"
    fitting = sorted(wheel for wheel in Path(sys.argv[2]).glob("*.whl") if fits(wheel, own))
    lay_out(fitting, Path(sys.argv[1]), own, f"{sys.base_prefix}/bin")

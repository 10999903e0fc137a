"""The deb under test, newer versions of it, and what apt says of them."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

from tests.lab.kernel import locked
from tests.lab.processes import run
from tests.nested.machine import CHECKOUT

_GIVEN = "NETPLUGIN_DEB"
_STORE = "agents/store/database.py"
_END_OF_MIGRATIONS = "\n)\n"
_BUILD_S = 300.0


def deb(target: Path, distribution: str = "deb12") -> Path:
    """What ``make dist`` makes of this checkout, or the one that the environment names."""
    if given := os.environ.get(_GIVEN):
        return Path(given)
    with locked("dist"):
        run(
            [sys.executable, "-m", "tools.dist", "--only", distribution, "--out", target],
            _BUILD_S,
            cwd=CHECKOUT,
        )
    (made,) = target.glob("*.deb")
    return made


def newer(original: Path, number: int, target: Path) -> Path:
    """The same package as version 0.1.``number``, whose store has so many migrations more."""
    tree = target / f"tree-{number}"
    run(["dpkg-deb", "-R", original, tree], _BUILD_S)
    control = tree / "DEBIAN/control"
    control.write_text(re.sub(r"(?m)^Version: .*$", f"Version: 0.1.{number}-1", control.read_text()))
    (store,) = tree.glob(f"opt/netplugin/lib/python3*/site-packages/{_STORE}")
    before, found, after = store.read_text().partition("_MIGRATIONS: tuple[str, ...] = (")
    end = after.index(_END_OF_MIGRATIONS)
    more = "".join(f'\n    "CREATE TABLE of_release_{each} (x);",' for each in range(1, number + 1))
    store.write_text(f"{before}{found}{after[:end]}{more}{after[end:]}")
    for compiled in (store.parent / "__pycache__").glob(f"{store.stem}.*"):
        compiled.unlink()
    for script in (tree / "DEBIAN").iterdir():
        text = script.read_text()
        raised = re.sub(
            r"(?m)^STORE_VERSION=(\d+)$", lambda known: f"STORE_VERSION={int(known[1]) + number}", text
        )
        if raised != text:
            script.write_text(raised)
    (tree / "DEBIAN/md5sums").unlink(missing_ok=True)
    made = target / f"netplugin_0.1.{number}-1_amd64.deb"
    # What is not compressed is unpacked sooner: it is not the compression that is tested.
    run(["dpkg-deb", "--root-owner-group", "-Znone", "--build", tree, made], _BUILD_S)
    shutil.rmtree(tree)
    return made

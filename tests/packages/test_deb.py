"""The deb in a root of Debian: what it installs, keeps, refuses and leaves."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT
from tests.lab.kernel import locked
from tests.lab.processes import run
from tests.packages.dist import built
from tests.packages.roots import Root, made

#: A package is built, unpacked and compiled several times.
pytestmark = [pytest.mark.outside, pytest.mark.timeout(3600)]
#: Debian 13 is in the long form.
DEBIANS = ["deb12", pytest.param("deb13", marks=pytest.mark.long)]
INSTALL = "umask 077; export DEBIAN_FRONTEND=noninteractive; dpkg --force-confold -i"
STORE = Path("var/lib/netplugin/agent.db")
UNIT = "netplugin-agent.service"


@pytest.fixture(params=DEBIANS)
def debian(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def root(debian: str, tmp_path: Path) -> Root:
    return Root(made(debian), tmp_path)


@pytest.fixture
def deb(debian: str, root: Root) -> str:
    """The package, in the root."""
    (package,) = built(debian).glob(f"*{debian}*.deb")
    (root.files / "srv").mkdir()
    shutil.copy(package, root.files / "srv")
    return f"/srv/{package.name}"


def changed(root: Root, deb: str, version: str, change: Callable[[Path], None] = lambda tree: None) -> str:
    """Another version of the package, with changes in its tree."""
    tree, package = root.work / version, root.files / deb.lstrip("/")
    run(["dpkg-deb", "-R", package, tree])
    control = tree / "DEBIAN/control"
    own = run(["dpkg-deb", "-f", package, "Version"]).strip()
    control.write_text(control.read_text().replace(f"Version: {own}", f"Version: {version}"))
    change(tree)
    target = root.files / f"srv/netplugin_{version}.deb"
    run(["dpkg-deb", "--root-owner-group", "-Znone", "--build", tree, target], 600)
    shutil.rmtree(tree)
    return f"/srv/{target.name}"


def store(root: Root, *ports: str, version: int = 1) -> Path:
    """A store with these ports, of a version of its schema."""
    path = root.files / STORE
    path.parent.mkdir(parents=True, exist_ok=True)
    with sqlite3.connect(path) as made:
        made.execute("PRAGMA journal_mode=WAL")
        made.execute("CREATE TABLE ports (port_id TEXT, vm_id TEXT, backend TEXT)")
        made.executemany("INSERT INTO ports VALUES (?, 'vm1', 'linuxbridge')", [(port,) for port in ports])
        made.execute(f"PRAGMA user_version={version}")
    made.close()
    return path


def test_it_works_at_once_and_leaves_nothing_after_a_purge(root: Root, deb: str, tmp_path: Path) -> None:
    """With root's umask of 077, a proxy but no network, no UTF-8, noexec on /tmp, and /opt a mount."""
    (tmp_path / "opt").mkdir()
    root.mounts = f"/tmp=noexec /opt={tmp_path}/opt"
    before = root.listing()
    printed = root.run(f"{INSTALL} {deb}", LC_ALL="de_DE.ISO-8859-1")
    assert "netplugin:" not in printed and "rror" not in printed

    assert root.run("netplugin --version").startswith("netplugin 0.")
    user = "setpriv --reuid=65534 --regid=65534 --clear-groups netplugin --version"
    assert root.run(user).startswith("netplugin 0."), "others than root may run it"
    assert "no mistakes" in root.run(
        "/opt/netplugin/bin/netplugin-agent --check /etc/netplugin/netplugin.conf"
    )
    assert root.run(f"systemctl is-enabled {UNIT}", status=1).strip() == "disabled"
    assert root.run("dpkg --verify netplugin") == ""
    assert root.run("stat -c '%a %U' /etc/netplugin/netplugin.conf /var/lib/netplugin").split() == [
        *("600", "root"),
        *("700", "root"),
    ]
    root.run(
        "getent group netplugin; logrotate --debug /etc/logrotate.d/netplugin; systemd-analyze verify " + UNIT
    )
    files = root.run("find /opt/netplugin /usr/bin/netplugin ! -type d ! -path '*/__pycache__/*' | sort")
    listed = root.run("dpkg -L netplugin").splitlines()
    assert [path for path in files.splitlines() if path not in listed] == []
    assert "not found" not in root.run("find /opt -name '*.so*' -exec ldd {} +")
    libvirt = "from netplugin.tuning.read_live import read_libvirt; print(read_libvirt().domains)"
    assert "libvirt-sock" in root.run(f'/opt/netplugin/bin/python -I -c "{libvirt}"'), "the platform's module"

    root.run("dpkg -r netplugin")
    left = root.listing().keys() - before.keys()
    assert not [path for path in left if path.startswith(("/opt/", "/usr"))]
    assert "/etc/netplugin/netplugin.conf" in left
    root.run("dpkg -P netplugin")
    assert root.listing() == before


def test_an_upgrade_keeps_an_edited_configuration_and_no_old_bytecode(root: Root, deb: str) -> None:
    def change(tree: Path) -> None:
        with (tree / "etc/netplugin/netplugin.conf").open("a") as conf:
            conf.write("# a new option\n")
        (site,) = (tree / "opt/netplugin/lib").glob("*/site-packages")
        shutil.rmtree(site / "drivers/vdpa")

    newer = changed(root, deb, "0.1.1", change)
    root.run(f"{INSTALL} {deb}; echo 'log_level = DEBUG' >> /etc/netplugin/netplugin.conf")
    root.run(f"{INSTALL} {newer}")
    conf = root.files / "etc/netplugin/netplugin.conf"
    assert conf.read_text().endswith("log_level = DEBUG\n") and conf.stat().st_mode & 0o777 == 0o600
    assert "drivers/vdpa" not in root.run("find /opt/netplugin -path '*drivers/*'")
    assert (root.files / "etc/netplugin/netplugin.conf.dpkg-dist").read_text().endswith("# a new option\n")

    # A newer store is refused by an older version, with what to do, and all stays as it was.
    path = store(root, "nic1", version=99)
    refused = root.run(f"dpkg -i {deb}", status=1)
    assert "netplugin store restore --state-path /var/lib/netplugin" in refused
    assert "0.1.1" in root.run("dpkg -s netplugin") and "ok installed" in root.run("dpkg -s netplugin")
    root.run("netplugin --version")

    # Removal, here without an agent that runs, lists the ports that stay.
    printed = root.run("dpkg -r netplugin")
    assert "port nic1 of VM vm1 (linuxbridge)" in printed and "netplugin port delete" in printed
    assert path.exists()
    socket = root.files / "run/netplugin/vhost"
    socket.mkdir(parents=True, exist_ok=True)
    os.mkfifo(socket / "not-a-socket")
    assert "/run/netplugin stays" in root.run("dpkg -P netplugin")
    assert not path.exists()


def test_a_virtualenv_of_pip_is_not_overwritten(root: Root, deb: str) -> None:
    root.run("mkdir -p /opt/netplugin/bin; touch /opt/netplugin/bin/activate")
    printed = root.run(f"{INSTALL} {deb}", status=1)
    assert "mv /opt/netplugin /opt/netplugin.pip" in printed
    assert root.run("find /opt -type f").split() == ["/opt/netplugin/bin/activate"]


@pytest.mark.long
@pytest.mark.parametrize("killed_after_s", [0.3, 1, 2, 4, 6])
def test_an_upgrade_that_was_killed_is_completed(root: Root, deb: str, killed_after_s: float) -> None:
    newer = changed(root, deb, "0.1.1")
    root.run(f"{INSTALL} {deb}")
    root.run(f"{INSTALL} {newer} & sleep {killed_after_s}; kill -KILL $!; wait || true")
    root.run(f"dpkg --configure -a; {INSTALL} {newer}")
    assert root.run("dpkg --verify netplugin; dpkg --audit") == ""
    assert "0.1.1" in root.run("dpkg -s netplugin") and root.run("netplugin --version")


@pytest.mark.long
def test_a_full_disk_leaves_what_a_second_try_completes(root: Root, deb: str) -> None:
    newer = changed(root, deb, "0.1.1")
    command = f"mount -t tmpfs -o size=150m tmpfs /opt; {INSTALL} {deb}; ! dpkg -i {newer}"
    command += f"; mount -o remount,size=400m /opt; dpkg --configure -a; {INSTALL} {newer}"
    printed = root.run(f"{command}; dpkg --verify netplugin; dpkg --audit; netplugin --version")
    assert "No space left" in printed and "netplugin 0." in printed.splitlines()[-1]


@pytest.mark.long
def test_two_builds_are_equal_and_the_second_needs_no_network(tmp_path: Path) -> None:
    sums = []
    for umask in (0o022, 0o077):
        out = tmp_path / oct(umask)
        command = ["unshare", "--net", sys.executable, "-m", "tools.dist", "--out", str(out)]
        with locked("dist"):
            subprocess.run(command, check=True, cwd=ROOT, umask=umask, stdout=subprocess.DEVNULL)
        sums.append((out / "SHA256SUMS").read_text())
    assert sums[0] == sums[1] and len(sums[0].splitlines()) == 9

"""The rpm and the offline archive, in a root of Debian 12: there is no mirror of EL or openEuler here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.processes import run
from tests.packages.dist import built
from tests.packages.roots import Root, made

pytestmark = [pytest.mark.outside, pytest.mark.long]


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root(made("deb12"), tmp_path)


def test_the_rpm_is_for_the_platforms_that_the_page_names() -> None:
    (package,) = built("rpm").glob("*.rpm")
    needed = run(["rpm", "-qp", "--requires", package]).splitlines()
    assert "/usr/bin/python3.11" in needed and "glibc >= 2.28" in needed
    # What rpm itself has to understand: 4.14 of EL 8 does not know zstd, 4.16 of EL 9 does.
    assert {line.split()[0] for line in needed if "rpmlib" in line} <= {
        "rpmlib(CompressedFileNames)",
        "rpmlib(FileDigests)",
        "rpmlib(PayloadFilesHavePrefix)",
        "rpmlib(PayloadIsZstd)",
    }
    listed = run(
        ["rpm", "-qp", "--queryformat", "[%{FILEMODES:octal} %{FILEUSERNAME} %{FILENAMES}\n]", package]
    )
    assert "100600 root /etc/netplugin/netplugin.conf" in listed
    assert run(["rpm", "-qp", "--configfiles", package]).split() == [
        "/etc/logrotate.d/netplugin",
        "/etc/netplugin/netplugin.conf",
    ]
    owned = {line.split()[2] for line in listed.splitlines()}
    assert not {"/usr", "/usr/bin", "/etc", "/opt", "/usr/lib/systemd/system"} & owned


def test_the_rpm_is_installed_upgraded_and_erased(root: Root) -> None:
    """By this machine's rpm, which runs the scripts in the root and knows no package of it."""
    (package,) = built("rpm").glob("*.rpm")

    def rpm(*words: str) -> str:
        return root.run(
            f"umask 077; rpm --root=$ROOT --dbpath=/var/lib/rpm --nodeps {' '.join(words)}", inside=False
        )

    before = root.listing()
    rpm("-i", str(package))
    assert root.run("netplugin --version").startswith("netplugin 0.")
    assert "no mistakes" in root.run(
        "/opt/netplugin/bin/netplugin-agent --check /etc/netplugin/netplugin.conf"
    )
    assert rpm("--verify netplugin") == ""
    root.run("echo 'log_level = DEBUG' >> /etc/netplugin/netplugin.conf")
    rpm("-U --force", str(package))
    assert root.run("tail -n 1 /etc/netplugin/netplugin.conf") == "log_level = DEBUG\n"
    assert (
        root.run("netplugin --version; find /opt/netplugin -name '*.pyc' | grep -c .").splitlines()[1] != "0"
    )
    rpm("-e netplugin")
    left = root.listing().keys() - before.keys() - {"/etc/netplugin", "/etc/netplugin/netplugin.conf.rpmsave"}
    left -= {"/run/netplugin", "/var/lib/netplugin", "/var/lib/rpm"}  # what is in /var/log is not listed
    assert left == set()


def test_the_archive_is_installed_again_and_removed(root: Root) -> None:
    (archive,) = built("archive").glob("*linux-x86_64.tar.gz")
    (root.files / "srv").mkdir()
    run(["tar", "-C", root.files / "srv", "-xf", archive], 120)
    folder = f"/srv/{archive.name.removesuffix('.tar.gz')}"
    before = root.listing()
    root.run(f"umask 077; {folder}/install.sh")
    assert root.run("netplugin --version").startswith("netplugin 0.")
    assert "no mistakes" in root.run(
        "/opt/netplugin/bin/netplugin-agent --check /etc/netplugin/netplugin.conf"
    )
    assert "not found" not in root.run("find /opt -name '*.so*' -exec ldd {} +")
    root.run(f"echo 'log_level = DEBUG' >> /etc/netplugin/netplugin.conf; {folder}/install.sh")
    assert root.run("tail -n 1 /etc/netplugin/netplugin.conf") == "log_level = DEBUG\n"
    assert root.run("stat -c %a /etc/netplugin/netplugin.conf").strip() == "600"
    root.run(f"{folder}/install.sh remove")
    left = root.listing().keys() - before.keys()
    assert {path for path in left if not path.startswith(("/etc/netplugin", "/run/", "/var/"))} == {
        "/etc/logrotate.d/netplugin"
    }
    damaged = next((root.files / folder.lstrip("/") / "wheels").glob("pyroute2*.whl"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert "pyroute2" in root.run(f"{folder}/install.sh", status=1)

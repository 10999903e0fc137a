"""The deb and the rpm, each of a tree with the virtualenv and what all hosts get."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

CONFFILES = ("/etc/logrotate.d/netplugin", "/etc/netplugin/netplugin.conf")
# Where files of the checkout go.
_HOST_FILES = {
    "etc/netplugin.conf": "etc/netplugin/netplugin.conf",
    "etc/logrotate.d/netplugin": "etc/logrotate.d/netplugin",
    "etc/systemd/netplugin-agent.service": "usr/lib/systemd/system/netplugin-agent.service",
    "etc/sysusers.d/netplugin.conf": "usr/lib/sysusers.d/netplugin.conf",
    "etc/tmpfiles.d/netplugin.conf": "usr/lib/tmpfiles.d/netplugin.conf",
    "LICENSE": "usr/share/doc/netplugin/copyright",
    "CHANGELOG.md": "usr/share/doc/netplugin/CHANGELOG.md",
}
# What dpkg runs, and with which first arguments (Debian policy, chapter 6).
_DEB_SCRIPTS = {
    "preinst": 'case "$1" in install | upgrade) before_files ;; esac',
    # Otherwise an upgrade was refused or failed: the files are the old ones, and the agent goes on.
    "postinst": 'case "$1" in configure) configured ;; *) compiled || true ;; esac',
    "prerm": 'case "$1" in remove) before_removal ;; *) drop_bytecode ;; esac',
    "postrm": 'case "$1" in remove) after_removal ;; purge) purged ;; esac',
}


@dataclass(frozen=True)
class Package:
    """What is packaged, and where: ``source`` is the checkout's copy, ``build`` has the drafts."""

    source: Path
    build: Path
    host_files: Path
    """The tree of what is not in /opt."""
    out: Path
    version: str
    epoch: int
    scripts: str
    """The functions of scripts.sh and their settings."""

    def lay_out_host_files(self, sbom: str) -> None:
        for source, target in _HOST_FILES.items():
            path = self.host_files / target
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.source / source, path)
        for name in ("selinux", "apparmor"):
            if (self.source / "etc" / name).is_dir():
                shutil.copytree(self.source / "etc" / name, self.host_files / "usr/share/netplugin" / name)
        (self.host_files / "etc/netplugin/netplugin.conf").chmod(0o600)
        (self.host_files / "usr/share/doc/netplugin/sbom.cdx.json").write_text(sbom)
        (self.host_files / "usr/bin").mkdir(parents=True)
        (self.host_files / "usr/bin/netplugin").symlink_to("/opt/netplugin/bin/netplugin")

    def deb(self, opt: Path, python: str, distribution: str) -> None:
        tree, revision = self._tree(opt, distribution), f"1+{distribution}"
        files = sorted(path for path in tree.rglob("*") if path.is_file() and not path.is_symlink())
        control = tree / "DEBIAN"
        control.mkdir()
        size = sum(path.stat().st_size for path in files) // 1024
        (control / "control").write_text(self._filled("control", REVISION=revision, SIZE=size, PYTHON=python))
        (control / "conffiles").write_text("".join(f"{name}\n" for name in CONFFILES))
        for name, call in _DEB_SCRIPTS.items():
            (control / name).write_text(f"#!/bin/sh\n{self.scripts}\n{call}\n")
            (control / name).chmod(0o755)
        target = self.out / f"netplugin_{self.version}-{revision}_amd64.deb"
        options = ("--root-owner-group", "-Zzstd", "-z12", "--threads-max=1")
        subprocess.run(["dpkg-deb", *options, "--build", tree, target], check=True, stdout=subprocess.DEVNULL)

    def rpm(self, opt: Path, python: str, name: str) -> None:
        tree, top = self._tree(opt, name), self.build / "rpmbuild"
        files = []
        for path in sorted(self.host_files.rglob("*")):
            file = f"/{path.relative_to(self.host_files)}"
            if path.is_dir() and "/netplugin" in file:
                files.append(f"%dir {file}")
            elif not path.is_dir():
                files.append(f"%config(noreplace) {file}" if file in CONFFILES else file)
        scripts = self.scripts.replace("%", "%%")
        spec = self.build / "netplugin.spec"
        values = {"PYTHON": python, "TREE": tree, "FILES": "\n".join(files)}
        spec.write_text(self._filled("netplugin.spec", SCRIPTS=scripts, **values))
        defines = (f"--define=_topdir {top}", f"--define=_rpmdir {self.out}")
        subprocess.run(["rpmbuild", "-bb", "--quiet", "--target=x86_64", *defines, spec], check=True)

    def _filled(self, name: str, **values: object) -> str:
        text = (self.source / "tools/dist" / name).read_text()
        for key, value in {"VERSION": self.version, **values}.items():
            text = text.replace(f"@{key}@", str(value))
        return text

    def _tree(self, opt: Path, name: str) -> Path:
        """All files of a package, with the time of the commit."""
        tree = self.build / name
        for part in (opt, self.host_files):
            shutil.copytree(part, tree, symlinks=True, dirs_exist_ok=True, copy_function=os.link)
        for path in (tree, *tree.rglob("*")):
            os.utime(path, (self.epoch, self.epoch), follow_symlinks=False)
        return tree

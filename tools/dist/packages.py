"""The deb and the rpm, of a tree with the virtualenv and of the files that all hosts get."""

from __future__ import annotations

import ast
import gzip
import hashlib
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

CONFFILES = ("/etc/logrotate.d/netplugin", "/etc/netplugin/netplugin.conf")
# Where files of the checkout go, and what they are there.
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
    "postinst": "configured",
    "prerm": 'case "$1" in remove) before_removal ;; *) drop_bytecode ;; esac',
    "postrm": 'case "$1" in remove) after_removal ;; purge) purged ;; esac',
}
# What rpm runs; $1 is how many versions are installed afterwards. What an upgrade removes is gone in posttrans only.
_RPM_SCRIPTS = {
    "pre": "before_files",
    "posttrans": "configured",
    "preun": 'if [ "$1" = 0 ]; then before_removal; else drop_bytecode; fi',
    "postun": 'if [ "$1" = 0 ]; then after_removal; fi',
}
_CONTROL = """\
Package: netplugin
Version: {version}
Section: net
Priority: optional
Architecture: amd64
Maintainer: The netplugin authors
Installed-Size: {size}
Depends: python{python}, systemd, libc6 (>= 2.28), libgcc-s1, libstdc++6
Recommends: nftables, python3-libvirt
Suggests: logrotate, openvswitch-switch-dpdk
Description: {description}
 The agent, its command line and its Python packages in a virtualenv of their own
 (/opt/netplugin). Installing it starts nothing.
"""
_SPEC = """\
%global __os_install_post %{{nil}}
%global debug_package %{{nil}}
%global _build_id_links none
%global _buildhost localhost
%global use_source_date_epoch_as_buildtime 1
%global clamp_mtime_to_source_date_epoch 1
%global _binary_payload w12.zstdio
Name: netplugin
Version: {version}
Release: {revision}
Summary: {description}
License: Apache-2.0
AutoReqProv: no
Requires: /usr/bin/python{python}, systemd, glibc >= 2.28, libgcc, libstdc++
Recommends: nftables, python3-libvirt
%description
The agent, its command line and its Python packages in a virtualenv of their own
(/opt/netplugin). Installing it starts nothing.
%install
cp -a {tree}/. %{{buildroot}}
{scripts}
%files
%defattr(-, root, root, -)
{files}
"""


@dataclass(frozen=True)
class Package:
    source: Path
    build: Path
    out: Path
    version: str
    revision: str
    description: str
    epoch: int

    @property
    def host_files(self) -> Path:
        """The tree of what is not in /opt."""
        return self.build / "host"

    @property
    def scripts(self) -> str:
        """The functions of the maintainer scripts, with the newest version of the store that this agent reads."""
        database = (self.source / "agents/store/database.py").read_text()
        steps = re.search(r"^_MIGRATIONS: .*? = \((.*?)^\)", database, re.M | re.S)
        if steps is None:
            raise ValueError("agents/store/database.py has no _MIGRATIONS")
        version = 1 + len(ast.literal_eval(f"({steps[1]})"))
        return f"STORE_VERSION={version}\n" + (self.source / "tools/dist/scripts.sh").read_text()

    def lay_out_host_files(self, sbom: str) -> None:
        for source, target in _HOST_FILES.items():
            path = self.host_files / target
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.source / source, path)
        (self.host_files / "etc/netplugin/netplugin.conf").chmod(0o600)
        (self.host_files / "usr/share/doc/netplugin/sbom.cdx.json").write_text(sbom)
        (self.host_files / "usr/bin").mkdir()
        (self.host_files / "usr/bin/netplugin").symlink_to("/opt/netplugin/bin/netplugin")
        for page in self.host_files.glob("usr/share/man/man*/*"):
            path = page.with_name(page.name + ".gz")
            path.write_bytes(gzip.compress(page.read_bytes(), mtime=self.epoch))
            page.unlink()

    def deb(self, opt: Path, python: str, distribution: str) -> None:
        tree, version = self._tree(opt, distribution), f"{self.version}-{self.revision}+{distribution}"
        files = sorted(path for path in tree.rglob("*") if path.is_file() and not path.is_symlink())
        control = tree / "DEBIAN"
        control.mkdir()
        size = sum(path.stat().st_size for path in files) // 1024
        text = _CONTROL.format(version=version, size=size, python=python, description=self.description)
        (control / "control").write_text(text)
        (control / "conffiles").write_text("".join(f"{name}\n" for name in CONFFILES))
        lines = [
            f"{hashlib.md5(path.read_bytes()).hexdigest()}  {path.relative_to(tree)}\n" for path in files
        ]
        (control / "md5sums").write_text("".join(lines))
        for name, call in _DEB_SCRIPTS.items():
            (control / name).write_text(f"#!/bin/sh\nset -e\n{self.scripts}\n{call}\n")
            (control / name).chmod(0o755)
        target = self.out / f"netplugin_{version}_amd64.deb"
        command = [
            "dpkg-deb",
            "--root-owner-group",
            "-Zzstd",
            "-z12",
            "--threads-max=1",
            "--build",
            str(tree),
            str(target),
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    def rpm(self, opt: Path, python: str) -> None:
        tree = self._tree(opt, "rpm")
        files = ["/opt/netplugin", "%dir /etc/netplugin", "%dir /usr/share/doc/netplugin"]
        files += [f"%config(noreplace) {name}" for name in CONFFILES]
        for path in sorted(self.host_files.rglob("*")):
            name = f"/{path.relative_to(self.host_files)}"
            if not path.is_dir() and name not in CONFFILES:
                files.append(name)
        scripts = "".join(f"%{name}\nset -e\n{self.scripts}\n{call}\n" for name, call in _RPM_SCRIPTS.items())
        spec = self.build / "netplugin.spec"
        spec.write_text(
            _SPEC.format(
                version=self.version,
                revision=self.revision,
                description=self.description,
                python=python,
                tree=tree,
                scripts=scripts.replace("%s", "%%s"),
                files="\n".join(files),
            )
        )
        top = self.build / "rpm"
        defines = [f"--define=_topdir {top}", f"--define=_rpmdir {top}"]
        command = ["rpmbuild", "-bb", "--quiet", "--target=x86_64-linux", *defines, str(spec)]
        subprocess.run(command, check=True)
        for made in top.rglob("*.rpm"):
            shutil.move(made, self.out)

    def _tree(self, opt: Path, name: str) -> Path:
        """All files of a package, with the time of the commit."""
        tree = self.build / name
        for part in (opt, self.host_files):
            shutil.copytree(part, tree, symlinks=True, dirs_exist_ok=True)
        for path in (tree, *tree.rglob("*")):
            os.utime(path, (self.epoch, self.epoch), follow_symlinks=False)
        return tree

"""Building an image of the VM: made once for the same inputs, and never half. mmdebstrap is a program of the
test that makes a few files; the disk is made by the real mke2fs and qemu-img."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from netplugin_zeroloss.cli.main import main
from netplugin_zeroloss.values import UnusableInput
from netplugin_zeroloss.vm import build, commands, image, tree
from netplugin_zeroloss.vm.build import Builder
from netplugin_zeroloss.vm.spec import VmSpec

from netplugin.libvirt import vm_image
from netplugin.libvirt.vm_image import Image
from tests.lab.processes import wait_for

#: Makes what a build needs of a root file system. It says when it is there, and waits if it is to.
_MMDEBSTRAP = """#!/bin/sh
set -e
echo "I: installing" >&2
while [ $# -gt 0 ] && [ "$1" != bookworm ]; do shift; done
[ $# -gt 1 ] || exit 9
root=$2
[ $# -eq 2 ] || cat "$3" > {0}/sources
echo "$SOURCE_DATE_EPOCH" >> {0}/called
[ ! -e {0}/fail ] || {{ echo "E: no such package" >&2; exit 25; }}
mkdir -p $root/boot $root/var/lib/dpkg $root/etc/ssh $root/var/log $root/root $root/usr/bin
cat > $root/var/lib/dpkg/status <<END
Package: linux-image-amd64
Status: install ok installed
Version: 6.1.2
Depends: linux-image-6.1.0-9-amd64 (= 6.1.2)

Package: gone
Status: deinstall ok config-files
Version: 1
END
for each in 6.1.0-9-amd64 6.1.0-9-cloud-amd64; do
  echo "kernel $each" > $root/boot/vmlinuz-$each
  echo "initrd $each" > $root/boot/initrd.img-$each
done
hostname > $root/etc/hostname
date +%N > $root/var/log/dpkg.log
echo secret > $root/etc/ssh/ssh_host_rsa_key
ln -s /nowhere $root/etc/resolv.conf
[ ! -e {0}/wait ] || {{ touch {0}/waiting; exec sleep 600; }}
"""
#: As a command of a shell, for what ends it.
_BUILD = """
import os, sys
from netplugin_zeroloss.cli.main import main
from netplugin_zeroloss.vm import commands
commands._CONTAINED = {contained!r}
os.geteuid = lambda: 0
sys.exit(main(["vm", "build", "--folder", {folder!r}, "--disk-mb", "16"]))
"""
_CONTAINED = ("setpriv", "--pdeathsig", "KILL", "--")
SPEC = VmSpec(disk_mb=16)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that mmdebstrap's answers are in; without namespaces, which take root."""
    monkeypatch.setattr(commands, "_CONTAINED", _CONTAINED)
    monkeypatch.setattr(build.os, "geteuid", lambda: 0)
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    program = tmp_path / "bin/mmdebstrap"
    program.parent.mkdir()
    program.write_text(_MMDEBSTRAP.format(tmp_path))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}:/usr/sbin:/sbin")
    return tmp_path


def _build(folder: Path, spec: VmSpec = SPEC, printed: list[str] | None = None, again: bool = False) -> Image:
    return Builder(folder / "vm", None, [].append if printed is None else printed.append).build(spec, again)


def _calls(programs: Path) -> int:
    return len((programs / "called").read_text().split())


def _file(made: Image, path: str) -> str:
    """The content of a file in the root file system of an image."""
    raw = made.folder.parent.parent / "look.raw"
    subprocess.run(["qemu-img", "convert", "-O", "raw", str(made.disk), str(raw)], check=True)
    done = subprocess.run(
        ["debugfs", "-R", f"cat {path}", str(raw)], capture_output=True, text=True, check=True
    )
    raw.unlink()
    return done.stdout


def test_an_image_is_built_once_for_the_same_inputs(programs: Path) -> None:
    printed: list[str] = []
    made = _build(programs, printed=printed)
    assert [line.partition(" ")[0] for line in printed] == ["1/5", "2/5", "3/5", "4/5", "5/5"]
    assert (made.folder / vm_image.KERNEL).read_text() == "kernel 6.1.0-9-amd64\n", "not the cloud kernel"
    assert made.manifest.packages == {"linux-image-amd64": "6.1.2"} and list(made.damage()) == []
    assert (programs / "called").read_text() == "1700000000\n"
    assert not (programs / "sources").exists(), "mmdebstrap knows Debian's mirrors itself"
    again = _build(programs, printed=printed)
    assert again == made and _calls(programs) == 1 and "has these inputs already" in printed[-1]
    other = _build(programs, VmSpec(disk_mb=16, vcpus=4))
    assert other.folder != made.folder and _calls(programs) == 2
    latest = programs / "vm/latest"
    assert image.read(latest) == other
    assert _build(programs).folder == latest.resolve(), "the link leads to the image of the last call"
    assert not list((programs / "vm").glob("building-*"))


def test_sources_that_are_given_are_the_only_ones(programs: Path) -> None:
    sources = "deb file:/srv/debian bookworm main\n"
    _build(programs, VmSpec(disk_mb=16, sources=sources))
    assert (programs / "sources").read_text() == sources
    _build(programs, VmSpec(disk_mb=16, snapshot="20261101T000000Z"))
    assert (programs / "sources").read_text().count("/20261101T000000Z ") == 3


def test_nothing_of_this_host_is_in_the_image(programs: Path) -> None:
    made = _build(programs)
    assert _file(made, "/etc/hostname") == "zeroloss\n" and _file(made, "/etc/resolv.conf") == ""
    assert _file(made, "/var/log/dpkg.log") == _file(made, "/etc/ssh/ssh_host_rsa_key") == ""
    login = (programs / "vm/key.pub").read_text().split()
    assert _file(made, "/root/.ssh/authorized_keys").split() == login[:2], "without a comment"
    assert len((programs / "vm/host_key.pub").read_text().split()) == 2
    private = (programs / "vm/host_key").read_text()
    assert _file(made, "/etc/ssh/ssh_host_ed25519_key") == private
    host_key = (programs / "vm/host_key.pub").read_text()
    assert (made.folder / "known_hosts").read_text() == f"* {host_key.strip()}\n"
    assert (made.folder / "key").stat().st_mode & 0o077 == 0
    assert private not in "".join(f.read_text() for f in made.folder.glob("*.json"))


def test_the_same_inputs_make_the_same_files_again(programs: Path) -> None:
    made = _build(programs)
    other = _build(programs, again=True)
    assert _calls(programs) == 2 and other.manifest.tree == made.manifest.tree
    assert other.folder == made.folder
    assert {p.name for p in (programs / "vm").iterdir()} == {
        *("key", "key.pub", "host_key", "host_key.pub", "latest", made.folder.name)
    }


def test_a_key_of_the_operator_is_used_and_not_copied(programs: Path) -> None:
    mine = programs / "mine"
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "me@here", "-f", str(mine)], check=True
    )
    made = Builder(programs / "vm", mine, [].append).build(SPEC)
    assert (made.folder / "key").readlink() == mine and not (programs / "vm/key").exists()
    assert "me@here" not in _file(made, "/root/.ssh/authorized_keys")
    mine.with_name("mine.pub").write_text("no key\n")
    with pytest.raises(UnusableInput, match="no public key"):
        Builder(programs / "vm", mine, [].append).build(SPEC)
    mine.with_name("mine.pub").unlink()
    with pytest.raises(UnusableInput, match="cannot be read"):
        Builder(programs / "vm", mine, [].append).build(SPEC)


def test_a_build_that_fails_leaves_nothing_and_the_last_image(programs: Path) -> None:
    made = _build(programs)
    before = sorted((programs / "vm").iterdir())
    (programs / "fail").touch()
    with pytest.raises(UnusableInput, match=r"mmdebstrap: it failed:(.|\n)*E: no such package"):
        _build(programs, again=True)
    with pytest.raises(UnusableInput, match="no such package"):
        _build(programs, VmSpec(disk_mb=16, vcpus=2))
    (programs / "fail").unlink()
    with pytest.raises(UnusableInput, match="mke2fs: it failed"):
        _build(programs, VmSpec(disk_mb=16, base=_archive(programs, size=32 << 20), install=False))
    assert sorted((programs / "vm").iterdir()) == before and image.read(programs / "vm/latest") == made


def _archive(folder: Path, size: int = 0) -> Path:
    """An archive of a root file system with a kernel."""
    root = folder / "base"
    (root / "boot").mkdir(parents=True)
    for name in ("vmlinuz-1", "initrd.img-1"):
        (root / "boot" / name).write_text(name)
    (root / "large").write_bytes(os.urandom(size))
    archive = folder / "base.tar.gz"
    subprocess.run(["tar", "-czf", str(archive), "-C", str(root), "."], check=True)
    return archive


def test_an_archive_is_a_base_that_is_only_read(programs: Path) -> None:
    archive = _archive(programs)
    before = archive.read_bytes()
    made = _build(programs, VmSpec(disk_mb=16, base=archive, install=False))
    assert (
        made.folder / vm_image.KERNEL
    ).read_text() == "vmlinuz-1" and made.manifest.origin == "base.tar.gz"
    assert archive.read_bytes() == before and not (programs / "called").exists()


def test_a_link_of_a_base_gives_nothing_of_this_host_away(programs: Path) -> None:
    host = programs / "host"
    host.mkdir(mode=0o755)
    (host / "shadow").write_text("SECRET")
    for link, target in (("root/.ssh", host), ("boot/vmlinuz-1", host / "shadow"), ("boot", host)):
        base = programs / link.replace("/", "-")
        (base / "boot").mkdir(parents=True)
        for name in ("vmlinuz-1", "initrd.img-1"):
            (base / "boot" / name).write_text(name)
        place = base / link
        if place.is_dir():
            place.rename(base / "other")
        place.parent.mkdir(exist_ok=True)
        place.unlink(missing_ok=True)
        place.symlink_to(target)
        archive = programs / f"{base.name}.tar"
        subprocess.run(["tar", "-cf", str(archive), "-C", str(base), "."], check=True)
        with pytest.raises(UnusableInput, match=f"/{link}"):
            _build(programs, VmSpec(disk_mb=16, base=archive, install=False))
    assert host.stat().st_mode & 0o777 == 0o755 and [path.name for path in host.iterdir()] == ["shadow"]
    assert not [path for path in (programs / "vm").iterdir() if path.is_dir()]


@pytest.mark.parametrize("option", ["backing_file=/etc/hostname,backing_fmt=raw", "data_file=data.raw"])
def test_a_disk_that_leads_to_another_file_is_no_base(programs: Path, option: str) -> None:
    disk = programs / "base.qcow2"
    command = ["qemu-img", "create", "-q", "-f", "qcow2", "-o", option, disk.name, "1M"]
    subprocess.run(command, check=True, cwd=programs)
    with pytest.raises(UnusableInput, match="needs no other file"):
        _build(programs, VmSpec(disk_mb=16, base=disk, install=False))


def test_a_tree_of_vpp_is_in_the_image(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (programs / "vpp/bin").mkdir(parents=True)
    (programs / "vpp/bin/vpp").write_text("vpp itself")
    made = _build(programs, VmSpec(disk_mb=16, vpp=programs / "vpp"))
    assert _file(made, "/opt/vpp/bin/vpp") == "vpp itself"
    assert "/opt/vpp/lib/x86_64-linux-gnu" in _file(made, "/etc/ld.so.conf.d/netplugin-vpp.conf")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda n: n.name)
def test_a_build_that_is_ended_leaves_nothing_that_counts_as_an_image(
    programs: Path, number: signal.Signals
) -> None:
    (programs / "wait").touch()
    text = _BUILD.format(contained=_CONTAINED, folder=str(programs / "vm"))
    # Where tests run in the background, as in some CI, SIGINT is ignored in all that they start.
    command = ["env", "--default-signal=INT", sys.executable, "-c", text]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        try:
            wait_for((programs / "waiting").exists, 60, "the root file system is being made")
            running.send_signal(number)
            _, errors = running.communicate(timeout=60)
        finally:
            running.kill()
    assert running.returncode == (-9 if number is signal.SIGKILL else 130), errors
    there = {path.name for path in (programs / "vm").iterdir()}
    unfinished = {name for name in there if name.startswith("building-")}
    assert there - unfinished == {"key", "key.pub", "host_key", "host_key.pub"}
    assert len(unfinished) == (number is signal.SIGKILL)
    with pytest.raises(UnusableInput, match="there is no image of the VM"):
        image.read(programs / "vm/latest")
    (programs / "wait").unlink()
    made = _build(programs)
    assert list(made.damage()) == [] and not list((programs / "vm").glob("building-*"))


def test_builds_in_one_folder_wait_for_each_other(programs: Path) -> None:
    (programs / "wait").touch()
    text = _BUILD.format(contained=_CONTAINED, folder=str(programs / "vm"))
    first = subprocess.Popen([sys.executable, "-c", text], stderr=subprocess.PIPE, text=True)
    try:
        wait_for((programs / "waiting").exists, 60, "the first build is on its way")
        (programs / "wait").unlink()
        second = subprocess.Popen([sys.executable, "-c", text], stderr=subprocess.PIPE, text=True)
        assert second.stderr is not None
        assert "another build runs" in second.stderr.readline()
        first.kill()
        _, errors = second.communicate(timeout=60)
        assert second.returncode == 0, errors
    finally:
        for each in (first, second):
            each.kill()
            each.communicate()


def test_what_is_missing_is_named_with_its_package(
    programs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(programs / "bin"))
    assert main(["vm", "build", "--folder", str(programs / "vm")]) == 2
    error = capsys.readouterr().err
    assert "qemu-img (apt-get install qemu-utils)" in error and "mmdebstrap" not in error
    assert not (programs / "vm").exists()
    monkeypatch.undo()
    monkeypatch.setattr(build.shutil, "which", lambda name: name)
    monkeypatch.setattr(build.os, "geteuid", lambda: 1000)
    assert main(["vm", "build", "--folder", str(programs / "vm")]) == 2
    assert "run it as root" in capsys.readouterr().err and not (programs / "vm").exists()


def test_a_key_that_cannot_be_made_is_reported_in_the_words_of_its_program(
    programs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keygen = programs / "bin/ssh-keygen"
    keygen.write_text("#!/bin/sh\necho 'no entropy' >&2\nexit 1\n")
    keygen.chmod(0o755)
    assert main(["vm", "build", "--folder", str(programs / "vm")]) == 2
    assert "ssh-keygen: no entropy" in capsys.readouterr().err
    assert not (programs / "called").exists() and not list((programs / "vm").iterdir())


def test_the_command_tells_the_next_one(programs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["vm", "build", "--folder", str(programs / "vm"), "--disk-mb", "16", "--quiet"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.splitlines()[-1].startswith("Next: cp tools/trex/matrix.yaml mine.yaml")
    assert f"image: {programs}/vm/latest" in printed.out and "8 vCPUs, 8192 MB" in printed.out


# -- the tree --------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "root").mkdir()
    yield tmp_path / "root"


def test_a_link_in_a_base_does_not_lead_to_this_host(root: Path) -> None:
    precious = root.parent / "precious"
    (precious / "journal").mkdir(parents=True)
    (precious / "x.log").write_text("of this host")
    for name in ("tmp", "run", "var"):
        (root / name).symlink_to(precious)
    (root / "var").unlink()
    (root / "var").mkdir()
    (root / "var/log").symlink_to(precious)
    tree.clean(root)
    assert (precious / "x.log").read_text() == "of this host" and (precious / "journal").is_dir()
    (root / "etc").symlink_to(precious)
    with pytest.raises(UnusableInput, match="/etc is no folder"):
        tree.write(root, {"etc/hostname": "zeroloss\n"})
    assert sorted(p.name for p in precious.iterdir()) == ["journal", "x.log"]


def test_a_tree_of_any_depth_is_walked_and_removed(root: Path) -> None:
    at = os.open(root, os.O_RDONLY)
    for _ in range(1100):
        os.mkdir("d", dir_fd=at)
        below = os.open("d", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)
    assert len(list(tree._walk(root))) == 1100
    tree.remove(root)
    assert not root.exists()
    root.mkdir()


def _changed(root: Path, change: Callable[[Path], object]) -> bool:
    before = tree.digest(root)
    change(root)
    return tree.digest(root) != before


def test_the_digest_sees_each_property_of_a_file(root: Path) -> None:
    (root / "a").write_text("1")
    (root / "link").symlink_to("a")
    os.utime(root / "a", (1, 1))
    for change in (
        lambda r: (r / "a").chmod(0o600),
        lambda r: os.utime(r / "a", (2, 2)),
        lambda r: ((r / "a").write_text("2"), os.utime(r / "a", (2, 2))),
        lambda r: (r / "a").rename(r / "b"),
        lambda r: (
            (r / "link").unlink(),
            (r / "link").symlink_to("b"),
            os.utime(r / "link", (1, 1), follow_symlinks=False),
        ),
    ):
        assert _changed(root, change)
    assert not _changed(root, lambda r: os.utime(r / "b", (9, 2))), (
        "the time of the last access does not count"
    )


def test_an_overlay_is_empty_and_its_base_is_not_written(programs: Path) -> None:
    made = _build(programs)
    before = made.disk.read_bytes()
    made.make_overlay("x")
    info = json.loads(
        subprocess.run(
            ["qemu-img", "info", "--output=json", str(made.overlay("x"))], capture_output=True, check=True
        ).stdout
    )
    assert info["full-backing-filename"] == str(made.disk) and info["backing-filename-format"] == "qcow2"
    subprocess.run(
        ["qemu-io", "-c", "write -P 7 0 1M", str(made.overlay("x"))], capture_output=True, check=True
    )
    first = made.overlay("x").read_bytes()
    made.make_overlay("x")
    assert made.overlay("x").read_bytes() != first, "it is made again for each VM"
    assert made.disk.read_bytes() == before and made.disk.stat().st_mode & 0o222 == 0
    made.remove_overlay("x")
    assert list(made.overlay("x").parent.iterdir()) == []

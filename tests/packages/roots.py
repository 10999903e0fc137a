"""Roots of Debian to install packages in: made once from the machine's own mirror, read-only below each test.

`python -m tests.packages.roots` makes them; commands in a root have no network.
"""

from __future__ import annotations

import hashlib
import platform
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.lab.apt import PrivateApt
from tests.lab.kernel import CACHE, locked, scratch
from tests.lab.processes import run

SUITES = {"deb12": "bookworm", "deb13": "trixie"}
#: What a hypervisor has, of what matters to the package.
_PACKAGES = {"deb12": "python3.11", "deb13": "python3.13"}
_SAME = "systemd,procps,libstdc++6,logrotate,nftables,python3-libvirt"
# Files that say when and how often packages were installed, copies of the file before, what systemctl caches.
_CHANGES = (
    "/var/(log|cache|lib/dpkg|lib/rpm)/|/etc/(group|gshadow|passwd|shadow)-|/etc/.pwd.lock|/run/systemd"
)
_ENTER = """\
set -e
root=$1; lower=$2; upper=$3; options=$4; shift 4
mount -t overlay overlay -o "lowerdir=$lower,upperdir=$upper/upper,workdir=$upper/work" "$root"
mount -t proc proc "$root/proc"
for device in null zero random urandom; do
    : > "$root/dev/$device"; mount --bind "/dev/$device" "$root/dev/$device"
done
for target in $options; do
    what=${target#*=}; target=${target%%=*}
    case "$what" in
        /*) mount --bind "$what" "$root$target" ;;
        *) mount -t tmpfs -o "$what" tmpfs "$root$target" ;;
    esac
done
[ "$ROOT" ] || exec chroot "$root" "$@"
ROOT=$root exec "$@"
"""


def made(name: str) -> Path:
    """The directory of a Debian's root, made first if there is none."""
    part, packages = f"root-{name}", f"{_PACKAGES[name]},{_SAME}"
    target = CACHE / f"{part}-{hashlib.sha256(packages.encode()).hexdigest()[:12]}"
    with locked(part):
        if not target.is_dir():
            with scratch(part) as directory:
                apt = PrivateApt(directory)
                apt.update()
                listed = directory / "only.list"
                own = platform.freedesktop_os_release().get("VERSION_CODENAME", "")
                listed.write_text(apt.sources(own, SUITES[name]))
                command = ["mmdebstrap", "--quiet", "--mode=root", "--variant=minbase", "--format=directory"]
                # Nothing here has to survive a crash of the machine.
                command += ["--dpkgopt=force-unsafe-io"]
                command += [f"--include={packages}", '--aptopt=APT::Sandbox::User "root"']
                unshared = ["unshare", "--mount", "--pid", "--fork", "--kill-child", *command]
                run([*unshared, SUITES[name], directory / "root", listed], 1800)
                (directory / "root").rename(target)
    return target


@dataclass
class Root:
    """A copy of a root that is written to in `work`, and ends with it."""

    lower: Path
    work: Path
    mounts: str = ""
    """What is mounted for each command: `/tmp=noexec /opt=/a/directory`."""

    def __post_init__(self) -> None:
        for name in ("root", "upper", "work"):
            (self.work / name).mkdir()

    @property
    def files(self) -> Path:
        """Where a file for the root is put, or one that it changed is read."""
        return self.work / "upper"

    def run(self, command: str, status: int = 0, inside: bool = True, **environment: str) -> str:
        """What a shell's command prints on both outputs. Fails with it on another exit status.

        ``inside``: in the root, or with its directory as $ROOT.
        """
        unshared = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--propagation=private"]
        words = ["/bin/sh", "-euc", _ENTER, "enter", self.work / "root", self.lower, self.work, self.mounts]
        settings = {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "LC_ALL": "C",
            "ROOT": "" if inside else "/",
            **environment,
        }
        done = subprocess.run(
            [*unshared, *map(str, words), "/bin/sh", "-uc", command],
            env={**settings, "http_proxy": "http://192.0.2.1:9", "https_proxy": "http://192.0.2.1:9"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            timeout=1800,
            check=False,
        )
        assert done.returncode == status, f"{command}: exit status {done.returncode}:\n{done.stdout}"
        return done.stdout

    def listing(self) -> dict[str, str]:
        """Kind, mode, owner and content of each file, but for what records that packages came and went."""
        pruned = "-path /proc -prune -o -path /dev -prune -o -path /tmp -prune -o"
        find = f"find / {pruned} -printf '%p\\t%y %m %U %G %l\\n'; "
        find += f"find / {pruned} -type f -exec sha256sum {{}} + | sed 's/\\([^ ]*\\)  \\(.*\\)/\\2\\t\\1/'"
        ignored = shlex.quote(f"^({_CHANGES})")
        found: dict[str, str] = {}
        for line in self.run(f"{{ {find}; }} | grep -Ev {ignored}").splitlines():
            path, _, rest = line.partition("\t")
            found[path] = f"{found.get(path, '')} {rest}"
        return found


if __name__ == "__main__":
    for each in SUITES:
        print(made(each))

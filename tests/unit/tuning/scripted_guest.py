"""A scripted VM at the edge: programs in place of virsh, qemu-img and ssh, for no VM can boot in a unit test.

Each file in the folder ``script`` changes what they do; ``state`` has what they keep.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from netplugin.libvirt.vm_image import Image
from tests.unit.zeroloss.images import made_up_image

#: As cyclictest 2.4 prints it, for vCPU 1 alone.
CYCLICTEST = {
    "rt_test_version:": "2.40",
    "thread": {
        "0": {"histogram": {"5": 90, "9": 10}, "cycles": 101, "min": 5, "max": 3000, "avg": 35.1, "cpu": 1}
    },
}
#: As iperf3 3.12 prints it for 4 streams; and as ip prints the NICs of either VM.
IPERF3 = {
    "start": {"version": "iperf 3.12"},
    "end": {"streams": [{}] * 4, "sum_received": {"bits_per_second": 9.4e9}},
}
LINKS = [
    {"ifname": "lo", "address": "00:00:00:00:00:00"},
    {"ifname": "enp0s17", "address": "52:54:00:5a:fe:01"},
    {"ifname": "ens17", "address": "52:54:00:5a:fe:02"},
]
_HEAD = f"#!{sys.executable} -SE\n"
_VIRSH = """import pathlib, re, signal, socket, sys, time
home = pathlib.Path(__file__).parents[1]
running, script = home / "state/running", home / "script"
words = sys.argv[3:]
def end(*_):
    mine.unlink(missing_ok=True)
    sys.exit(0)
def named(name):
    return home / "state/running" / name
if words[0] == "list":
    print("other", *(each.name for each in running.iterdir()))
    if (script / "dies-booting").exists():
        for each in running.iterdir():
            each.unlink()
elif words[0] == "destroy":
    named(words[1]).unlink()
    (home / "state/destroyed").touch()
else:
    if (script / "refuse").exists():
        sys.exit("error: internal error: unable to map backing store for guest RAM")
    xml = pathlib.Path(words[0].split()[1]).read_text()
    name = re.search("<name>(.*)</name>", xml)[1]
    mine = named(name)
    assert "--autodestroy" in words[0] and f"/{name}.qcow2" in xml
    (home / "state" / f"{name}.xml").write_text(xml)
    signal.signal(signal.SIGTERM, end)
    listener = socket.socket()
    if not (script / "silent").exists() and not (script / "dies-booting").exists():
        listener.bind(("127.0.0.1", int(re.search(r"hostfwd=tcp:127.0.0.1:([0-9]+)-:22", xml)[1])))
        listener.listen()
    listener.settimeout(0.05)
    mine.touch()
    while mine.exists():
        try:
            listener.accept()[0].sendall(b"SSH-2.0-scripted\\r\\n")
        except OSError:
            time.sleep(0.01)
"""
_SSH = """import pathlib, shlex, sys, time
home = pathlib.Path(__file__).parents[1]
script = home / "script"
assert "BatchMode=yes" in sys.argv and sys.argv[-2] == "root@127.0.0.1"
words = shlex.split(sys.argv[-1])
with (home / "state/called").open("a") as called:
    print(*words, file=called)
if words[0] == "which" and (script / "lacks").exists():
    sys.exit(1)
if words[0] == "uname":
    print("6.1.0-rt")
if words[0] == "cyclictest":
    if (script / "dies").exists():
        (home / "state/running/netplugin-verify").unlink()
        sys.exit("Connection to 127.0.0.1 closed by remote host.")
    if (script / "hangs").exists():
        (home / "state/hanging").touch()
        time.sleep(600)
    if (script / "fails").exists():
        sys.exit("\\x1b[31mcyclictest: no memory")
    if (script / "writes-base").exists():
        base = pathlib.Path((script / "writes-base").read_text())
        base.write_text("something else")
if words[:2] == ["ip", "-json"]:
    print((script / "links.json").read_text())
unit = home / "state/testpmd"
if words[0] == "systemd-run" and not (script / "no-frames").exists():
    unit.touch()
if words[:2] == ["systemctl", "stop"]:
    unit.unlink(missing_ok=True)
if words[:2] == ["systemctl", "show"]:
    print("failed" if (script / "no-frames").exists() else "active")
if words[0] == "journalctl":
    print("EAL: no free hugepages\\x1b[2J")
if words[0] == "ss" and not (script / "deaf").exists():
    print("LISTEN 0 4096 *:5201 *:*")
if words[0] == "ethtool" and (script / "no-lso").exists():
    sys.exit("Could not change any device features")
if words[:2] == ["iperf3", "--client"]:
    print((script / "iperf3.json").read_text())
if words[0] == "cat":
    if (script / "floods").exists():
        while True:
            sys.stdout.write("x" * 65536)
    sys.stdout.write((script / "cyclictest.json").read_text())
"""
_IPERF3 = """import pathlib, sys, time
script = pathlib.Path(__file__).parents[1] / "script"
if "--server" in sys.argv:
    print("Server listening", flush=True)
    time.sleep(60)
print((script / "iperf3-here.json").read_text())
"""
_TESTPMD = """import json, os, pathlib, re, socket, sys
home = pathlib.Path(__file__).parents[1]
vhost = socket.socket(socket.AF_UNIX)
vhost.bind(re.search("iface=([^,]*)", " ".join(sys.argv))[1])
vhost.listen()
folder = pathlib.Path(os.environ["RUNTIME_DIRECTORY"]) / "dpdk/host"
folder.mkdir(parents=True)
telemetry = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
telemetry.bind(str(folder / "dpdk_telemetry.v2"))
telemetry.listen()
print("packet forwarding - ports=1", flush=True)
frames = 0
while True:
    asks = telemetry.accept()[0]
    asks.send(b'{"version": "DPDK 22.11"}')
    while asks.recv(1000):
        frames += 1000 * (home / "state/testpmd").exists()
        asks.send(json.dumps({"/ethdev/stats": {"ipackets": frames}}).encode())
"""
_QEMU_IMG = """import pathlib, sys
pathlib.Path(sys.argv[-1]).write_text("overlay\\n")
"""


class ScriptedGuest:
    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.home = home
        for name in ("bin", "state/running", "script"):
            (home / name).mkdir(parents=True)
        programs = {
            "virsh": _VIRSH,
            "ssh": _SSH,
            "qemu-img": _QEMU_IMG,
            "iperf3": _IPERF3,
            "dpdk-testpmd": _TESTPMD,
        }
        for name, text in programs.items():
            (home / "bin" / name).write_text(_HEAD + text)
            (home / "bin" / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{home / 'bin'}:{os.environ['PATH']}")
        self.script("cyclictest.json", json.dumps(CYCLICTEST))
        self.script("iperf3.json", json.dumps(IPERF3))
        self.script("iperf3-here.json", json.dumps(IPERF3))
        self.script("links.json", json.dumps(LINKS))
        self.image = made_up_image(
            home / "image",
            home / "key",
            vcpus=2,
            memory_mb=1024,
            arguments="root=/dev/vda isolcpus=managed_irq,domain,1",
            packages={"rt-tests": "2.4", "iperf3": "3.12", "ethtool": "6.1", "dpdk-dev": "22.11"},
        )

    def script(self, name: str, text: str = "") -> None:
        (self.home / "script" / name).write_text(text)

    @property
    def called(self) -> list[str]:
        """The programs that ran in the VM."""
        try:
            return [line.split()[0] for line in (self.home / "state/called").read_text().splitlines()]
        except FileNotFoundError:
            return []

    def left(self) -> list[str]:
        """What there is of a VM: the domain, files of its overlay."""
        overlays = self.image.folder / "overlays"
        files = [file.name for file in overlays.iterdir()] if overlays.is_dir() else []
        return files + [file.name for file in (self.home / "state/running").iterdir()]

    def was_killed(self, image: Image) -> None:
        """Leave what a killed run leaves, if libvirt was killed too."""
        for name in ("netplugin-verify", "netplugin-verify-2"):
            (self.home / "state/running" / name).touch()
            image.overlay(name).parent.mkdir(exist_ok=True)
            image.overlay(name).write_text("half")

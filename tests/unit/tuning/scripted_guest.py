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
#: virsh and ssh are started for each question: what they import would take twice as long as all else.
_HEAD = f"""#!{sys.executable} -SE
import os, sys, time
home = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
def has(name):
    return os.path.exists(f"{{home}}/script/{{name}}")
def text(name):
    with open(f"{{home}}/script/{{name}}") as file:
        return file.read()
"""
_VIRSH = """running = f"{home}/state/running"
words = sys.argv[3:]
if words[0] == "list":
    print("other", *os.listdir(running))
    if has("dies-booting"):
        for each in os.listdir(running):
            os.unlink(f"{running}/{each}")
elif words[0] == "destroy":
    os.unlink(f"{running}/{words[1]}")
    open(f"{home}/state/destroyed", "w").close()
else:
    import pathlib, re, signal, socket
    if has("refuse"):
        sys.exit("error: internal error: unable to map backing store for guest RAM")
    xml = pathlib.Path(words[0].split()[1]).read_text()
    name = re.search("<name>(.*)</name>", xml)[1]
    mine = pathlib.Path(running, name)
    def end(*_):
        mine.unlink(missing_ok=True)
        sys.exit(0)
    assert "--autodestroy" in words[0] and f"/{name}.qcow2" in xml
    pathlib.Path(home, "state", f"{name}.xml").write_text(xml)
    signal.signal(signal.SIGTERM, end)
    listener = socket.socket()
    if not has("silent") and not has("dies-booting"):
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
_SSH = """assert "BatchMode=yes" in sys.argv and sys.argv[-2] == "root@127.0.0.1"
words = sys.argv[-1].split()
if "'" in sys.argv[-1]:
    import shlex
    words = shlex.split(sys.argv[-1])
with open(f"{home}/state/called", "a") as called:
    print(*words, file=called)
if words[0] == "which" and has("lacks"):
    sys.exit(1)
if words[0] == "uname":
    print("6.1.0-rt")
if words[0] == "cyclictest":
    if has("dies"):
        os.unlink(f"{home}/state/running/netplugin-verify")
        sys.exit("Connection to 127.0.0.1 closed by remote host.")
    if has("hangs"):
        open(f"{home}/state/hanging", "w").close()
        time.sleep(600)
    if has("fails"):
        sys.exit("\\x1b[31mcyclictest: no memory")
    if has("writes-base"):
        with open(text("writes-base"), "w") as base:
            base.write("something else")
if words[:2] == ["ip", "-json"]:
    print(text("links.json"))
unit = f"{home}/state/testpmd"
if words[0] == "systemd-run" and not has("no-frames"):
    open(unit, "w").close()
if words[:2] == ["systemctl", "stop"] and os.path.exists(unit):
    os.unlink(unit)
if words[:2] == ["systemctl", "show"]:
    print("failed" if has("no-frames") else "active")
if words[0] == "journalctl":
    print("EAL: no free hugepages\\x1b[2J")
if words[0] == "ss" and not has("deaf"):
    print("LISTEN 0 4096 *:5201 *:*")
if words[0] == "ethtool" and has("no-lso"):
    sys.exit("Could not change any device features")
if words[:2] == ["iperf3", "--client"]:
    print(text("iperf3.json"))
if words[0] == "cat":
    if has("floods"):
        while True:
            sys.stdout.write("x" * 65536)
    sys.stdout.write(text("cyclictest.json"))
"""
_IPERF3 = """if "--server" in sys.argv:
    print("Server listening", flush=True)
    time.sleep(60)
print(text("iperf3-here.json"))
"""
_TESTPMD = """import json, pathlib, re, socket
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
        frames += 1000 * os.path.exists(f"{home}/state/testpmd")
        asks.send(json.dumps({"/ethdev/stats": {"ipackets": frames}}).encode())
"""
_QEMU_IMG = """with open(sys.argv[-1], "w") as overlay:
    overlay.write("overlay\\n")
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

"""The parts of the nested testbed that need no guest: what it is given, and what it reports."""

from __future__ import annotations

import json
import selectors
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.lab import apt, initramfs
from tests.lab.kernel import Kernel, parse_load_order
from tests.lab.processes import LabError, LabTimeout
from tests.nested import machine, plugin, pulse
from tests.nested.machine import BootError, Ends, Machine, Needs, StalledError
from tests.nested.prepare import Emulator, Parts

PLAN = """\
Reading package lists...
Inst libnew (2.0-1 Debian Backports:oldstable-backports [amd64])
Inst qemu-system-x86 [1:7.2+dfsg-7] (1:10.0.2+ds-2 Debian Backports:oldstable-backports [amd64]) []
Conf libnew (2.0-1 Debian Backports:oldstable-backports [amd64])
"""
MODULES_DEP = """\
kernel/fs/9p/9p.ko.xz: kernel/net/9p/9pnet.ko.xz kernel/fs/netfs/netfs.ko.xz
kernel/net/9p/9pnet.ko.xz:
kernel/fs/netfs/netfs.ko.xz:
kernel/net/9p/9pnet_virtio.ko.xz: kernel/net/9p/9pnet.ko.xz
kernel/drivers/vfio/vfio-pci.ko:
"""


def test_only_what_is_missing_is_fetched() -> None:
    planned = [str(package) for package in apt.parse_plan(PLAN)]
    assert planned == ["libnew=2.0-1", "qemu-system-x86=1:10.0.2+ds-2"]


def test_one_more_suite_comes_from_the_machines_mirror_and_is_debians() -> None:
    (line,) = apt.sources(["http://mirror/debian/"], "bookworm-backports").splitlines()
    assert line.startswith("deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] ")
    assert line.endswith(" http://mirror/debian/ bookworm-backports main")


def test_apt_keeps_what_it_has_in_the_directories_it_is_given() -> None:
    text = apt.settings(Path("/d/lists"), Path("/d/cache"), Path("/d/parts"))
    assert 'Dir::State::lists "/d/lists";' in text
    assert 'Dir::Cache "/d/cache";' in text
    assert 'Dir::Etc::sourceparts "/d/parts";' in text


def test_a_module_is_loaded_after_what_it_needs_and_once() -> None:
    order = parse_load_order(MODULES_DEP, ["9p", "9pnet_virtio", "vfio_pci"])
    assert order == ["netfs", "9pnet", "9p", "9pnet_virtio", "vfio_pci"]
    with pytest.raises(LabError, match="no module igb"):
        parse_load_order(MODULES_DEP, ["igb"])


def test_the_initrd_has_init_busybox_and_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    busybox = tmp_path / "busybox"
    busybox.write_bytes(b"BUSYBOX")
    (tmp_path / "9p.ko").write_bytes(b"MODULE")
    monkeypatch.setattr(initramfs, "BUSYBOX", busybox)
    kernel = Kernel("6.12", tmp_path / "vmlinuz", tmp_path)
    (tmp_path / "netfs.ko").write_bytes(b"OTHER")
    archive = initramfs.build(kernel, ["netfs", "9p"], "INIT")
    files = {"bin/busybox": b"BUSYBOX", "modules/9p.ko": b"MODULE", "modules/order": b"netfs 9p"}
    for name, content in files.items():
        assert name.encode() + b"\0" in archive and content in archive
    assert b"init\0" in archive and b"INIT" in archive
    assert b"virtio_net" not in archive and archive.endswith(b"\0")


def test_the_init_quotes_what_it_is_given() -> None:
    script = machine.init_script(["netfs", "9p"], "/a venv/bin/python")
    assert "for module in netfs 9p; do" in script
    assert script.splitlines()[-1].endswith("/root '/a venv/bin/python' -m tests.nested.init")


def test_qemu_gets_what_the_guest_needs() -> None:
    kernel = Kernel("6.12", Path("/k/vmlinuz"), Path("/k/modules"))
    parts = Parts(Emulator(Path("/q")), kernel)
    ends = Ends(*(cast(socket.socket, SimpleNamespace(fileno=lambda n=n: n)) for n in (7, 8, 9)))
    args = machine.qemu_args(Needs(4, 2048, 100), parts, Path("/share"), ends)
    command_line = " ".join(args)
    assert "-smp 4 -m 2048" in command_line
    assert "hugepages=100" in args[-1]
    assert "local,path=/,mount_tag=root,security_model=none,multidevs=remap,readonly=on" in command_line
    assert "path=/share,mount_tag=share" in command_line
    for word in ("id=channel,fd=7", "id=pulse,fd=8", "id=monitor,fd=9"):
        assert f"socket,{word}" in command_line
    assert command_line.count("-device igb,") == 2


@pytest.mark.parametrize("asked", [{"memory_mb": 4096}, {"cpus": 0}, {"memory_mb": 1024, "hugepages": 512}])
def test_a_guest_that_cannot_be_is_refused(asked: dict[str, int]) -> None:
    with pytest.raises(LabError, match="a guest has"):
        Needs(**asked)


def test_what_the_guest_could_not_see_is_reported_beforehand() -> None:
    machine.check_visible(Path("/usr/bin/python3"), Path("/running/checkout"))
    with pytest.raises(LabError, match="has its own /dev"):
        machine.check_visible(Path("/dev/shm/venv/bin/python"))


def item(name: str, **asked: int) -> pytest.Item:
    marker = pytest.mark.nested(**asked).mark
    return cast(pytest.Item, SimpleNamespace(nodeid=name, get_closest_marker=lambda _name: marker))


def test_tests_with_the_same_needs_share_a_guest() -> None:
    items = [item("a"), item("b", cpus=4), item("c", cpus=1), item("d", hugepages=10, cpus=4)]
    groups = plugin.grouped(items)
    names = {needs: [found.nodeid for found in group] for needs, group in groups.items()}
    assert names == {Needs(): ["a", "c"], Needs(4): ["b"], Needs(4, hugepages=10): ["d"]}


@pytest.mark.parametrize("asked", [{"memory": 1024}, {"memory_mb": 9999}])
def test_a_marker_that_asks_for_nonsense_names_the_test(asked: dict[str, int]) -> None:
    with pytest.raises(pytest.UsageError, match=r"tests/x\.py::test_y: marker nested"):
        plugin.needs_of(item("tests/x.py::test_y", **asked))


def test_the_inner_pytest_has_the_options_of_the_outer_one_and_the_tests_by_name() -> None:
    given = ("-m", "nested", "-x", "--junit-xml=out.xml", "tests/functional")
    config = SimpleNamespace(
        option=SimpleNamespace(file_or_dir=["tests/functional"]),
        invocation_params=SimpleNamespace(args=given),
        inipath=Path("/c/tox.ini"),
        rootpath=Path("/c"),
    )
    command = plugin.inner_command(cast(pytest.Config, config), ["tests/functional/x.py::y[1]"])
    inner_args = command[command.index("pytest") + 1 :]
    assert inner_args[:4] == ["-m", "nested", "-x", "--junit-xml=out.xml"]
    assert inner_args.index("--junit-xml=") > 3, "the outer one alone writes it"
    assert "tests/functional" not in inner_args
    assert inner_args[-1] == "/c/tests/functional/x.py::y[1]"


def test_the_inner_environment_reaches_the_checkout_and_the_systems_programs() -> None:
    inner = plugin.inner_environment({"PATH": "/venv/bin", "PYTHONPATH": "/other", "CI": "true"})
    assert inner["CI"] == "true"
    assert inner["PYTHONPATH"] == f"{machine.CHECKOUT}:/other"
    assert inner["PATH"].startswith("/venv/bin:") and "/usr/sbin" in inner["PATH"]


def test_a_skips_reason_is_a_tuple_again() -> None:
    data = {"location": ["f", 1, "t"], "longrepr": ["f", 2, "why"], "user_properties": [["a", 1]]}
    assert plugin.with_tuples(data) == {
        "location": ("f", 1, "t"),
        "longrepr": ("f", 2, "why"),
        "user_properties": [("a", 1)],
    }
    failed = {"longrepr": {"reprcrash": {}}, "user_properties": []}
    assert plugin.with_tuples(failed) == failed


class Says:
    """A guest that prints these lines."""

    def __init__(self, *events: str | Exception) -> None:
        self._events: Iterator[str | Exception] = iter(events)

    def receive(self, deadline_s: float) -> dict[str, Any] | None:
        event = next(self._events, None)
        if isinstance(event, Exception):
            raise event
        return None if event is None else {"event": event}

    def tail(self) -> str:
        return "the console's end"


@pytest.mark.parametrize("events", [(), ("up",), ("up", LabTimeout("silence"))])
def test_a_guest_that_does_not_come_to_pytest_may_be_tried_again(events: Any) -> None:
    with pytest.raises(BootError, match="the guest did not boot"):
        plugin.boot(cast(Machine, Says(*events)), plugin.Run(Needs(), []))


def test_a_pytest_that_ends_before_it_has_begun_is_not_tried_again() -> None:
    with pytest.raises(LabError, match="the console's end") as caught:
        plugin.boot(cast(Machine, Says("up", "ended")), plugin.Run(Needs(), []))
    assert not isinstance(caught.value, BootError)


@pytest.mark.parametrize(
    ("failures", "tries"),
    [
        ([BootError("no boot"), BootError("no boot"), BootError("no boot\nconsole")], 3),
        ([BootError("no boot")], 2),
        ([StalledError("no heartbeat")], 2),
        ([BootError("no boot"), StalledError("no heartbeat"), StalledError("no heartbeat")], 3),
        ([LabError("hung")], 1),
    ],
)
def test_only_a_guest_that_did_not_boot_or_stalled_is_tried_again(
    failures: list[LabError], tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = plugin.Outside(cast(pytest.Config, None))
    left, tried, reported = list(failures), [], []

    def in_guest(_session: object, _parts: object, run: plugin.Run, number: int) -> str:
        tried.append(run)
        assert number == len(tried)
        if left:
            raise left.pop(0)
        return "ended"

    monkeypatch.setattr(outside, "_in_guest", in_guest)
    monkeypatch.setattr(outside, "_report_missing", lambda *args: reported.append(args[-1]))
    outside.run_group(cast(Any, None), cast(Any, None), Needs(), [item("a")])
    assert len(tried) == tries
    assert [run.replaced for run in tried[:-1]] == list(map(str, failures[: tries - 1]))
    assert reported == [str(failures[-1]) if len(failures) == tries else "ended"]


@contextmanager
def guest(tmp_path: Path, beats: bool = True) -> Iterator[tuple[Machine, Ends]]:
    """A machine whose guest is this test: the ends that its QEMU has."""
    (tmp_path / machine.CONSOLE).write_text("the kernel's last words\n")
    pairs = [socket.socketpair() for _ in range(3)]
    with ExitStack() as closed:
        for each in (end for pair in pairs for end in pair):
            closed.enter_context(each)
        ours, theirs = (Ends(*(pair[side] for pair in pairs)) for side in (0, 1))
        if beats:
            theirs.pulse.sendall(b"41.0\n42.5\n")
        yield Machine(tmp_path, ours), theirs


class Watch:
    """A clock on which waits take as long as they are asked to, or so much longer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, late_s: float = 0.0) -> None:
        self.now, self.late_s, self.rounds = 0.0, late_s, 0
        monkeypatch.setattr(machine, "_seconds", lambda: self.now)
        really = selectors.DefaultSelector.select

        def select(events: selectors.DefaultSelector, timeout: float) -> Any:
            found = really(events, 0)
            if not found:
                self.rounds += 1
                self.now += timeout + self.late_s
            return found

        monkeypatch.setattr(selectors.DefaultSelector, "select", select)


def qmp(theirs: Ends, answers: dict[str, str]) -> Thread:
    """QEMU's monitor, which ends when it is asked to inject an NMI."""

    def serve() -> None:
        with theirs.monitor.makefile("rwb", 0) as stream:
            stream.write(b'{"QMP": {}}\n{"event": "STOP"}\n')
            for line in stream:
                asked = json.loads(line)
                command = asked.get("arguments", {}).get("command-line", "")
                stream.write(b'{"event": "RTC_CHANGE"}\n')
                stream.write(json.dumps({"return": answers.get(command, "")}).encode() + b"\n")
                if asked["execute"] == "inject-nmi":
                    break
        theirs.monitor.close()

    thread = Thread(target=serve)
    thread.start()
    return thread


def test_a_guest_without_a_heartbeat_is_given_up_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(monkeypatch)
    registers = "CPU#0\nRAX=0 RBX=1\nRIP=ffffffff81000000 RFL=00000002 HLT=1\n"
    with guest(tmp_path) as (watched, theirs):
        monitor = qmp(theirs, {"info registers -a": registers})
        with pytest.raises(StalledError) as caught:
            watched.receive(600)
        monitor.join(30)
    assert pulse.SILENCE_S <= watch.now < 2 * pulse.SILENCE_S
    error_text = str(caught.value)
    for words in ("its clock said 42.5 s", "RIP=ffffffff81000000", "the kernel's last words"):
        assert words in error_text
    assert "RAX" not in error_text


def test_what_a_monitor_does_not_answer_is_no_error_of_the_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.nested.monitor.ANSWER_S", 0.1)
    Watch(monkeypatch)
    with guest(tmp_path) as (watched, _), pytest.raises(StalledError, match="QEMU's monitor"):
        watched.receive(600)


def test_silence_counts_while_its_watcher_watches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A watcher that gets no CPU for 9 s of 10 reads its guest, which has none either, as rarely."""
    watch = Watch(monkeypatch, late_s=9.0)
    with guest(tmp_path) as (watched, theirs):
        theirs.monitor.close()
        with pytest.raises(StalledError):
            watched.receive(6000)
    assert watch.rounds == pulse.SILENCE_S and watch.now == 10 * pulse.SILENCE_S


def test_a_guest_that_says_something_or_boots_is_not_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Watch(monkeypatch)
    with guest(tmp_path, beats=False) as (watched, theirs), pytest.raises(LabTimeout, match="90 s"):
        watched.receive(90)
    with guest(tmp_path) as (watched, theirs):
        for number in range(3):
            with pytest.raises(LabTimeout):
                watched.receive(pulse.SILENCE_S - 2)
            theirs.channel.sendall(json.dumps({"event": str(number)}).encode() + b"\n")
            assert watched.receive(1) == {"event": str(number)}
            with pytest.raises(LabTimeout):
                watched.receive(pulse.SILENCE_S - 2)
            theirs.pulse.sendall(b"50.0\n")
        theirs.pulse.close()
        theirs.channel.close()
        assert watched.receive(1) is None


def test_what_ran_does_not_run_again() -> None:
    run = plugin.Run(Needs(), [item(name) for name in "abcd"])
    run.reported = {"a": "teardown", "b": "call", "c": "setup"}
    assert [left.nodeid for left in run.left()] == ["c", "d"]


def test_what_a_killed_run_left_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.lab.kernel.CACHE", tmp_path)
    monkeypatch.setattr(machine, "CACHE", tmp_path)
    (tmp_path / "guest-left").mkdir()
    with machine.shared_directory() as first, machine.shared_directory() as second:
        assert set(tmp_path.glob("guest-*")) == {first, second}
    assert not list(tmp_path.glob("guest-*"))

"""Sockets at paths that the caller chooses: below a root, with directories of ours, and nothing of others."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from drivers.ovs import sockets
from drivers.ovs.plan import arrivals, departures
from drivers.ovs.ports import VhostPort
from drivers.ovs.socket_directories import (
    MakeSocketDirectory,
    RemoveChosenSocket,
    SocketChange,
)
from drivers.ovs.sockets import KIND, ObservedSockets, check, claim_socket
from netplugin.api.errors import Conflict, HostError, InvalidRequest
from netplugin.backend import Change, Claim, Intent
from netplugin.host.ovs import OvsSettings
from netplugin.host.ovs_rows import OvsPort
from netplugin.host.ovs_sockets import OvsSockets
from tests.unit.drivers.ovs.conftest import spec_of

ME, GROUP, QEMU = os.geteuid(), 64055, 64101
SETTINGS = OvsSettings(OvsSockets(""), Path("/run/vhost"), "qemu", vhost_socket_roots=(Path("/run/zs"),))


@dataclass
class Host:
    """A root on the file system, and the claims of ports, as the agent stores them."""

    root: Path
    claims: dict[str, Claim]

    def path(self, below: str) -> str:
        return str(self.root / below)

    @property
    def settings(self) -> OvsSettings:
        return replace(SETTINGS, vhost_socket_roots=(self.root,))

    def intent(self, port_id: str, below: str, **spec: Any) -> Intent:
        had = (self.claims[port_id],) if port_id in self.claims else ()
        return Intent(port_id, spec_of(vhost_user_socket=self.path(below), **spec), claims=had)

    def claim(self, port_id: str, below: str, **spec: Any) -> VhostPort:
        """As ``claims`` of a backend and the commit."""
        taken = {claim: owner for owner, claim in self.claims.items()}
        intent = self.intent(port_id, below, **spec)
        self.claims[port_id] = claim_socket(self.settings, intent, None, taken)
        intent = self.intent(port_id, below, **spec)
        return VhostPort.of("x", intent, "br", 0, socket=self.claims[port_id].key, tso=False)

    def seen(self, *ports: str) -> ObservedSockets:
        claims: Mapping[str, tuple[str, Mapping[str, Any]]]
        claims = {i: (claim.key, claim.memory) for i, claim in self.claims.items()}
        return sockets.look_at_chosen(ObservedSockets({}, {}, GROUP), claims, ports or None)

    def plug(self, port_id: str, below: str, **spec: Any) -> VhostPort:
        port = self.claim(port_id, below, **spec)
        apply(arrivals(port, ObservedSockets({}, {}, GROUP)))
        for ports in ((), (port_id,)):
            assert arrivals(port, self.seen(*ports)) == [], "planned again"
        return port

    def unplug(self, port_id: str) -> None:
        apply(departures(port_id, self.seen(port_id)))
        for ports in ((), (port_id,)):
            assert departures(port_id, self.seen(*ports)) == [], "planned again"
        del self.claims[port_id]

    def tree(self) -> dict[str, str]:
        return {str(p.relative_to(self.root)): mode_of(p) for p in sorted(self.root.rglob("*"))}


def apply(changes: list[Change]) -> None:
    for change in changes:
        assert isinstance(change, SocketChange) and change.describe()
        change.apply()


def mode_of(path: Path) -> str:
    found = path.lstat()
    return f"{found.st_uid}:{found.st_gid} {found.st_mode & 0o7777:o}"


def listen(path: str) -> None:
    """As QEMU, which leaves the file."""
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path)


@pytest.fixture
def host() -> Iterator[Host]:
    # Not below pytest's directory, which may be too long for a UNIX socket, or have hidden parts.
    with tempfile.TemporaryDirectory(prefix="np-") as directory:
        root = Path(directory) / "r"
        root.mkdir(0o711)
        yield Host(root, {})


LONG = f"/a/b/{'x' * 103}"  # 108 bytes

# -- what is refused before ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/",
        "a/b/c",
        "/etc/passwd",
        "/a/b/../c",
        "/a/./b/c",
        "/a//b/c",
        "/a/b/c/",
        "/a/b/c d",
        "/a/b/c\n",
        LONG,
        5,
    ],
)
def test_a_path_is_absolute_plain_and_short(path: object) -> None:
    with pytest.raises(ValidationError):
        spec_of(vhost_user_socket=path)


def test_a_path_is_below_a_root_in_a_directory_of_its_own() -> None:
    for good in ("/run/zs/vm/nic", "/run/zs/dpdkvhostuserclient/vm/vnic1.0", "/run/vhost/vm/nic", None):
        check(SETTINGS, spec_of(vhost_user_socket=good))
    for bad in ("/run/zs/nic", "/run/zsx/vm/nic", "/etc/vm/nic", "/run/vhost/nps0/x"):
        with pytest.raises(InvalidRequest, match="vhost_user_socket") as refused:
            check(SETTINGS, spec_of(vhost_user_socket=bad))
        assert refused.value.errors[0].field == "vhost_user_socket"
    with pytest.raises(InvalidRequest):
        check(replace(SETTINGS, vhost_socket_roots=()), spec_of(vhost_user_socket="/run/zs/vm/nic"))


def test_a_path_is_that_of_one_port(host: Host) -> None:
    host.claim("p", "vm/nic")
    host.claim("u", "of_user/nic", qemu_user=QEMU)
    for below, spec in (
        ("vm/nic", {}),
        ("vm/nic/below", {}),
        ("vm/sub/nic", {}),
        ("of_user/nic2", {}),
        ("of_user/nic2", {"qemu_user": QEMU + 1}),
    ):
        with pytest.raises(Conflict, match=r"port [pu]"):
            host.claim("q", below, **spec)
    with pytest.raises(Conflict, match="port p"):
        host.claim("q", "vm")
    host.claim("deep", "a/b/nic")
    with pytest.raises(Conflict, match="port deep"):
        host.claim("q", "a/nic")
    host.claim("q", "vm/nic2")
    derived = claim_socket(host.settings, Intent("d", spec_of()), None, {})
    assert not sockets.is_chosen(derived) and sockets.is_chosen(host.claims["q"])


def test_a_port_that_is_still_being_removed_gets_no_other_path(host: Host) -> None:
    claimed = host.claim("p", "vm/nic").chosen
    assert host.claim("p", "vm/nic").chosen is claimed
    with pytest.raises(Conflict, match="still being removed"):
        host.claim("p", "vm/other")
    with pytest.raises(Conflict, match="still being removed"):
        claim_socket(host.settings, Intent("p", spec_of(), claims=(host.claims["p"],)), None, {})


def test_a_file_of_others_is_refused_and_stays(host: Host) -> None:
    (host.root / "vm").mkdir()
    for make in (listen, lambda path: Path(path).touch(), lambda path: Path(path).symlink_to("/nowhere")):
        make(host.path("vm/nic"))
        with pytest.raises(Conflict, match="there is a file"):
            host.claim("p", "vm/nic")
        (host.root / "vm/nic").unlink()
    # After a lost store, the row says that the path is the port's.
    listen(host.path("vm/nic"))
    row = OvsPort("npv1", "br", 7, "access", {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sockets, "path_of", lambda row: host.path("vm/nic"))
        claim = claim_socket(host.settings, host.intent("p", "vm/nic"), row, {})
    assert claim.key == host.path("vm/nic")


# -- directories -----------------------------------------------------------------------------------------


def test_directories_come_and_go_with_their_ports(host: Host) -> None:
    port = host.plug("p", "client/vm/nic0")
    assert port.socket == host.path("client/vm/nic0")
    assert host.tree() == {"client": f"{ME}:{os.getegid()} 711", "client/vm": f"0:{GROUP} 2770"}
    host.plug("q", "client/vm/nic1")
    host.plug("u", "client/of_user/nic0", qemu_user=QEMU)
    assert host.tree()["client/of_user"] == f"{QEMU}:0 700"
    for name in ("vm/nic0", "vm/nic1", "of_user/nic0"):
        listen(host.path(f"client/{name}"))
    host.unplug("p")
    assert {*host.tree()} == {
        "client",
        "client/vm",
        "client/vm/nic1",
        "client/of_user",
        "client/of_user/nic0",
    }
    host.unplug("u")
    assert {*host.tree()} == {"client", "client/vm", "client/vm/nic1"}
    host.unplug("q")
    assert host.tree() == {} and host.root.exists()


def test_a_directory_stays_for_a_port_whose_vm_has_not_started(host: Host) -> None:
    host.plug("p", "vm/nic0")
    host.plug("q", "vm/nic1")
    host.unplug("p")
    assert {*host.tree()} == {"vm"}
    host.unplug("q")
    assert host.tree() == {}


def test_a_directory_of_others_stays_as_it_is(host: Host) -> None:
    (host.root / "vm").mkdir(0o777)
    os.chmod(host.root / "vm", 0o777)
    before = host.tree()
    host.plug("p", "vm/nic0")
    listen(host.path("vm/nic0"))
    host.unplug("p")
    assert host.tree() == before
    os.chmod(host.root / "vm", 0o755)
    with pytest.raises(HostError, match="QEMU"):
        host.plug("q", "vm/nic1", qemu_user=QEMU)


def test_what_others_put_there_stays(host: Host) -> None:
    host.plug("p", "vm/nic0")
    (host.root / "vm/theirs").touch()
    (host.root / "vm/nic0").write_text("not a socket")
    host.unplug("p")
    assert {*host.tree()} == {"vm", "vm/theirs", "vm/nic0"}


def test_a_removal_that_was_cut_off_is_finished(host: Host) -> None:
    for steps in (["a/vm/nic"], ["a/vm/nic", "a/vm"], ["a/vm/nic", "a/vm", "a"]):
        host.plug("p", "a/vm/nic")
        listen(host.path("a/vm/nic"))
        for step in steps:
            path = host.root / step
            path.rmdir() if path.is_dir() else path.unlink()
        host.unplug("p")
        assert host.tree() == {}


@pytest.mark.parametrize("made", [[], ["a"], ["a", "a/vm"]])
def test_a_plug_that_was_cut_off_is_finished_or_undone(host: Host, made: list[str]) -> None:
    for undo in (False, True):
        port = host.claim("p", "a/vm/nic")
        for each in made:
            (host.root / each).mkdir(0o700)
        if not undo:
            apply(arrivals(port, host.seen("p")))
            assert arrivals(port, host.seen("p")) == []
            assert host.tree()["a/vm"] == f"0:{GROUP} 2770" and host.tree()["a"].endswith("711")
        host.unplug("p")
        assert host.tree() == {}


def test_a_directory_that_others_change_is_repaired(host: Host) -> None:
    port = host.plug("p", "vm/nic")
    right = host.tree()
    for wrong in (lambda vm: vm.chmod(0o777), lambda vm: os.chown(vm, 5, 5), lambda vm: vm.rmdir()):
        wrong(host.root / "vm")
        changes = arrivals(port, host.seen("p"))
        assert [type(change) for change in changes] == [MakeSocketDirectory]
        apply(changes)
        assert host.tree() == right and arrivals(port, host.seen()) == []


# -- no way out of the root ------------------------------------------------------------------------------


@pytest.mark.parametrize("link", ["a", "a/vm"])
def test_no_symbolic_link_is_followed(host: Host, tmp_path: Path, link: str) -> None:
    outside = tmp_path / "o"
    (outside / "vm").mkdir(parents=True)
    port = host.claim("p", "a/vm/nic")
    (host.root / link).parent.mkdir(exist_ok=True)
    (host.root / link).symlink_to(outside)
    before = {p: mode_of(p) for p in outside.rglob("*")}
    with pytest.raises(HostError, match="symbolic link"):
        apply(arrivals(port, ObservedSockets({}, {}, GROUP)))
    for there in ("vm/nic", "nic"):
        listen(str(outside / there))
    removal = RemoveChosenSocket(
        ("p",), sockets.ChosenSocket(port.socket, str(host.root), True, (host.path("a/vm"), host.path("a")))
    )
    with pytest.raises(HostError, match="symbolic link"):
        removal.apply()
    assert before.items() <= {p: mode_of(p) for p in outside.rglob("*")}.items()
    assert (outside / "vm/nic").exists() and (outside / "nic").exists()


def test_nobody_else_may_replace_a_directory_above(host: Host) -> None:
    for wrong in (lambda a: a.chmod(0o777), lambda a: os.chown(a, QEMU, 0)):
        (host.root / "a").mkdir(0o711)
        wrong(host.root / "a")
        port = host.claim("p", "a/vm/nic")
        with pytest.raises(HostError, match="root alone"):
            apply(arrivals(port, host.seen("p")))
        assert [*host.tree()] == ["a"]
        (host.root / "a").rmdir()
        del host.claims["p"]


def test_a_claim_is_of_this_kind(host: Host) -> None:
    """What ``Store.claimed`` gives to the reader."""
    assert host.claim("p", "vm/nic").chosen == Claim(KIND, host.path("vm/nic"))
    assert host.claims["p"].memory == {"root": str(host.root), "made": [host.path("vm")], "user": None}

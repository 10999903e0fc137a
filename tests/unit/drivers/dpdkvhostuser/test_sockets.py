"""Where the socket of a port is, for whom its directory is, and what of it is never touched."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from drivers.dpdkvhostuser.plan import make_plan
from drivers.ovs import sockets
from drivers.ovs.plan import arrivals
from drivers.ovs.ports import VhostPort
from drivers.ovs.socket_directories import MakeSocketDirectory, RemoveSocketDirectory
from drivers.ovs.sockets import Directory, ObservedSockets
from netplugin.api.errors import HostError
from netplugin.backend import Claim, Intent
from netplugin.host.names import SOCKETS, VHOST, device_name
from tests.unit.drivers.dpdkvhostuser.model import SETTINGS, Model
from tests.unit.drivers.dpdkvhostuser.scenes import converge, plain_spec

OWN, NAME = device_name(SOCKETS, "p"), device_name(VHOST, "p")
INTENT = Intent("p", plain_spec())
MOVED = replace(SETTINGS, vhost_socket_dir=Path("/run/elsewhere"))


def test_a_port_keeps_its_path_whatever_the_options_become() -> None:
    claim = sockets.claim_socket(SETTINGS, INTENT, None, {})
    assert claim.key == f"/run/vhost/{OWN}/{NAME}"
    claimed = replace(INTENT, claims=(claim,))
    assert sockets.claim_socket(MOVED, claimed, None, {}) == claim
    assert sockets.socket_path(MOVED, claimed, None) == claim.key


def test_a_port_without_a_record_is_where_its_row_says() -> None:
    model = Model()
    converge(model, [INTENT])
    row = model.observe().rows["p"]
    assert sockets.claim_socket(MOVED, INTENT, row, {}).key == f"/run/vhost/{OWN}/{NAME}"
    assert make_plan(MOVED, [INTENT], model.observe()).changes == ()
    assert row.interface is not None
    for elsewhere in ("/etc/passwd", f"/run/vhost/{NAME}", f"/run/vhost/{OWN}/other"):
        strange = replace(row.interface, options={"vhost-server-path": elsewhere})
        drifted = replace(row, interfaces=(strange,))
        assert sockets.claim_socket(SETTINGS, INTENT, drifted, {}).key == f"/run/vhost/{OWN}/{NAME}"


def test_no_port_is_made_whose_path_dpdk_would_cut() -> None:
    """One that is there keeps what it has; ``vhost-server-path`` would not change anyway."""
    claim = Claim(sockets.KIND, f"/{'d' * 93}/{NAME}")
    intent, model = replace(INTENT, claims=(claim,)), Model()
    found = make_plan(SETTINGS, [intent], model.observe())
    assert found.changes == () and found.refused["p"].step == "socket-directory"
    assert "107 bytes" in found.refused["p"].detail
    fits = replace(INTENT, claims=(Claim(sockets.KIND, f"/{'d' * 91}/{NAME}"),))
    assert converge(model, [fits]) == set()


@pytest.mark.parametrize(
    ("path", "user", "desired"),
    [
        (f"/run/vhost/{OWN}/{NAME}", None, Directory(f"/run/vhost/{OWN}", 0, 7, 0o2770)),
        (f"/run/vhost/{OWN}/{NAME}", 40001, Directory(f"/run/vhost/{OWN}", 40001, 0, 0o700)),
        (f"/run/vhost/{NAME}", 40001, None),
        (f"/tmp/{NAME}", None, None),
        (f"/run/vhost/nps00000000000/{NAME}", None, None),
    ],
)
def test_for_whom_a_directory_is(path: str, user: int | None, desired: Directory | None) -> None:
    intent = Intent("p", plain_spec().model_copy(update={"qemu_user": user}))
    port = VhostPort.of("dpdkvhostuser", intent, "br1", 0, socket=path, tso=False)
    made = [MakeSocketDirectory(("p",), desired, "/run/vhost", (desired.path,))] if desired else []
    assert arrivals(port, ObservedSockets({}, {}, 7)) == made


def test_a_directory_comes_and_goes_with_its_port() -> None:
    claim = sockets.claim_socket(SETTINGS, INTENT, None, {})
    intent = replace(INTENT, claims=(claim,))
    model = Model()

    def seen(**there: ObservedSockets) -> list[object]:
        observed = replace(model.observe(["p"]), **there)
        return [type(change) for change in make_plan(SETTINGS, [intent], observed).changes]

    desired = sockets.directory_for(f"/run/vhost/{OWN}", None, 7)
    assert MakeSocketDirectory in seen(sockets=ObservedSockets({}, {}, 7))
    converge(model, [intent])
    there = ObservedSockets({"p": (desired.path,)}, {desired.path: desired}, 7)
    assert seen(sockets=there) == []
    open_to_all = replace(desired, mode=0o777)
    assert seen(sockets=replace(there, directories={desired.path: open_to_all})) == [MakeSocketDirectory]
    intent = Intent("p", None)
    assert RemoveSocketDirectory in seen(sockets=there)


def test_directories_on_the_file_system(tmp_path: Path) -> None:
    me, group = os.getuid(), os.getgid()
    settings = replace(SETTINGS, vhost_socket_dir=tmp_path / "vhost")
    sockets.make_directories(settings)
    assert settings.vhost_socket_dir.stat().st_mode & 0o7777 == 0o711
    path = Path(sockets.new_path(settings, "p"))
    own = str(path.parent)
    make = MakeSocketDirectory(("p",), Directory(own, me, group, 0o700), str(tmp_path / "vhost"), (own,))
    make.apply()
    path.touch()
    seen = sockets.look(settings, ["p", "q"], {})
    assert seen.own == {"p": (str(path.parent),)}
    assert seen.directories[str(path.parent)] == Directory(str(path.parent), me, group, 0o700)
    (path.parent / "link").symlink_to(tmp_path)
    for _ in range(2):
        RemoveSocketDirectory(("p",), str(path.parent)).apply()
    assert not path.parent.exists() and tmp_path.exists()
    path.parent.symlink_to(tmp_path)
    with pytest.raises(HostError):
        make.apply()

"""The PF with seven VFs and the far end of its wire, and what the guest's kernel tells of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from netplugin.host.vfs import read_interfaces
from tests.lab.namespaces import namespace, pings, within
from tests.lab.processes import LabError, run, wait_for
from tests.nested import nics
from tests.nested.nics import PF, WIRE

FAR = "far"
VFS = 7
DEADLINE_S = 90.0
NO_MAC = "00:00:00:00:00:00"


@contextmanager
def pf_with_vfs() -> Iterator[str]:
    """The PF's interface, up, with VFs that igbvf has."""
    nics.modprobe("igbvf", "vfio-pci", "8021q")
    name = nics.interface(PF.pci)
    run(["ip", "link", "set", name, "up"])
    with ExitStack() as stack:
        # A VF whose question to the PF came too late, on a busy machine, has no MAC until it is made again.
        for last in (False, False, True):
            try:
                made = stack.enter_context(ExitStack())
                addresses = made.enter_context(nics.virtual_functions(PF, VFS, autoprobe=True))
                wait_for(
                    lambda found=addresses: all(driver(a) == "igbvf" for a in found),
                    DEADLINE_S,
                    "igbvf binds",
                )
                wait_for(lambda: len(vf_macs(name)) == VFS, DEADLINE_S, "igbvf has chosen its MACs")
                break
            except LabError:
                if last:
                    raise
                made.close()
        yield name


@contextmanager
def far_end() -> Iterator[str]:
    """The other end of the wire, in a namespace, with VLAN 100 and an address on it."""
    name = "wire"  # its old name may be a VF's when it comes back
    with namespace(FAR):
        run(["ip", "link", "set", nics.interface(WIRE.pci), "netns", FAR, "name", name])
        for words in (
            ["ip", "link", "set", name, "up"],
            ["ip", "addr", "add", "10.8.0.1/24", "dev", name],
            ["ip", "link", "add", "link", name, "name", "wire.100", "type", "vlan", "id", "100"],
            ["ip", "link", "set", "wire.100", "up"],
            ["ip", "addr", "add", "10.9.0.1/24", "dev", "wire.100"],
        ):
            run(within(FAR, words))
        yield FAR
        run(within(FAR, ["ip", "link", "del", "wire.100"]))
        run(within(FAR, ["ip", "link", "set", name, "netns", "1"]))


def driver(address: str) -> str | None:
    link = nics.device(address) / "driver"
    return link.resolve().name if link.exists() else None


def vf_info(pf: str, netns: str | None = None) -> dict[int, dict[str, Any]]:
    """What ``ip`` tells of the VFs, by number, in the namespace of the PF."""
    [reported] = json.loads(run(within(netns, ["ip", "-j", "-d", "link", "show", "dev", pf])))
    return {vf["vf"]: vf for vf in reported.get("vfinfo_list", [])}


def vf_macs(pf: str) -> dict[int, str]:
    found = {number: vf["address"] for number, vf in vf_info(pf).items()}
    return {number: mac for number, mac in found.items() if mac != NO_MAC}


def whole_state(pf: str, addresses: Sequence[str]) -> Any:
    """All that must be as before when a port is gone; a MAC that a VF's driver chose may be another."""
    files = {a: (driver(a), (nics.device(a) / "driver_override").read_text()) for a in addresses}
    reported = vf_info(pf)
    for number, address in enumerate(addresses):
        if any(interface.own_mac for interface in read_interfaces(nics.device(address))):
            reported[number]["address"] = "its driver's choice"
    return reported, files


def functions() -> list[str]:
    """The VFs' addresses by their numbers."""
    return [(nics.device(PF.pci) / f"virtfn{n}").resolve().name for n in range(VFS)]


def ping(address: str, count: int = 1, wait_s: int = 1) -> bool:
    """Whether it answers, from the far end."""
    return pings(FAR, address, count, wait_s)

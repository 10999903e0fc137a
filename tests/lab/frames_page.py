"""Writes docs/security-frames.md from the kinds of frames that the tests send.

``python -m tests.lab.frames_page`` writes the page; tests/docs hold it to be as it would be written.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from scapy.packet import Raw

from tests.lab.frames import KINDS, Backend, Kind, Sender, Setting, checksum_from

_SENDER = Sender("52:54:00:00:00:01", "52:54:00:00:00:fe", "10.9.0.1")
PAGE = Path(__file__).resolve().parents[2] / "docs/security-frames.md"

_HEAD = """\
# Which frame of a VM goes where

This page is written by `python -m tests.lab.frames_page` from
[tests/lab/frames.py](../tests/lab/frames.py). The tests `tests/functional/test_frames_*.py` send each of
these frames from a VM's port and fail where one does not go where the table says.

**passed**: it left by the uplink, in the network's own VLAN or VNI, and came to the other VMs of the
network, as it was sent. **dropped**: it came out nowhere: not on the wire, not at a VM of this or of
another network, not at the host's own protocols. A frame that came out anywhere else fails the test,
so no cell shows it.

The columns `disabled` to `addresses, roles` are settings of `port_security`: not `enabled`; `enabled`
alone, which lets the VM use its own MAC with any address; with `allowed_addresses`; and both again with the
`roles` `router` and `dhcp_server`. What the page lists was seen on

- `linuxbridge`: flat and VXLAN networks, and VLANs in a guest whose kernel has them;
- `dpdkvhostuser`: flat, VLAN and VXLAN networks, on a bridge that the agent made;
- `vdpa` in relay mode (`relay`): what came out at the VF, in whose place is a device of DPDK's. What the
  NIC then does with it is not seen.

A cell counts for all of them, unless it names one. Not seen, and therefore **unknown**, is `vdpa` in native
mode: no OVS that has its port type could be tried. Its filters are the same flows as those of
`dpdkvhostuser`.

The column `offload` says at which bytes of the frame a VM on `linuxbridge` may have the host write a
checksum (virtio's `NEEDS_CSUM`, at `csum_start` plus `csum_offset`). The tests send each frame with a
checksum at the first of these bytes, and it goes where the other columns say; and with checksums before it,
and each is dropped, with every setting. On `dpdkvhostuser` and `relay` OVS writes no checksum at a place of
the VM's choice once it has judged the frame: DPDK writes it as it takes the frame from the VM, or OVS where
it finds TCP's or UDP's itself. That is read in the sources of OVS 3.1 to 4.0 and DPDK, for
`userspace-tso-enable` on and off; no test sends such frames there. See
[Offloads](security.md#offloads).

`sriov` is read in the sources of the kernel's drivers, for `port_security` with `enabled` alone: a NIC
looks at the source MAC (`spoofchk`) and at the VLAN, at nothing else. "by the NIC" depends on the NIC, see
[Virtual functions](security.md#virtual-functions).

The last two columns are what two other filters do, each read in its source: neutron's OVS firewall
(`neutron/agent/linux/openvswitch_firewall/firewall.py`, `_initialize_egress` and
`_initialize_egress_ipv6_icmp`, at commit 2131d26f7326; "if a rule lets it" is what the port's security
groups allow), and libvirt's `clean-traffic` with the parameter `IP` (`src/nwfilter/xml`, as libvirt 9.0
installs them). "unknown" is what reading alone does not settle.
"""

_TAIL = """\

`clean-traffic` filters in the bridge's hooks of ebtables. The kernel's bridge takes frames to
01:80:c2:00:00:01 to 0f before these hooks: it forwards none of them, drops those to 01, and leaves the
others to the host. Those to 00 it forwards as any frame while it speaks no STP itself (`br_handle_frame`,
net/bridge/br_input.c).
"""


def page() -> str:
    return "".join([_HEAD, "\n", *_table(), _TAIL])


def _table() -> Iterator[str]:
    columns = ["frame", *Setting, "offload", "sriov", "neutron's OVS firewall", "clean-traffic"]
    yield _row(columns)
    yield _row(["---"] * len(columns))
    for kind in KINDS:
        cells = [_cell(kind, setting) for setting in Setting]
        yield _row([kind.name, *cells, _offload(kind), kind.sriov, kind.neutron, kind.clean_traffic])


def _cell(kind: Kind, setting: Setting) -> str:
    usual = _fate(setting in kind.passes)
    others = [b for b in Backend if kind.passes_on(b, setting) != (setting in kind.passes)]
    if not others:
        return usual
    return f"{usual}; {_fate(setting not in kind.passes)} on " + ", ".join(others)


def _offload(kind: Kind) -> str:
    if not any(kind.passes_on(Backend.LINUXBRIDGE, setting) for setting in Setting):
        return "dropped"
    places = {checksum_from(bytes(frame / Raw(b"...."))) for frame in kind.build(_SENDER)}
    if places == {None}:
        return "never"
    return "from byte " + " or ".join(str(place) for place in sorted(p for p in places if p is not None))


def _fate(passes: bool) -> str:
    return "passed" if passes else "dropped"


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

"""Bonds as ovs-appctl tells of them, and what is made of it."""

from __future__ import annotations

from netplugin.host.ovs_bonds import BondUse, OvsBond, fault, findings, parse_bonds

# Captured from OVS 3.1.0.
SHOWN = """\
---- bond0 ----
bond_mode: active-backup
bond may use recirculation: no, Recirc-ID : -1
bond-hash-basis: 0
lb_output action: disabled, bond-id: -1
updelay: 0 ms
downdelay: 0 ms
lacp_status: off
lacp_fallback_ab: false
active-backup primary: <none>
active member mac: 22:56:1b:ca:b2:97(u1)

member u0: disabled
  may_enable: false

member u1: enabled
  active member
  may_enable: true

---- bond1 ----
bond_mode: balance-tcp
bond may use recirculation: yes, Recirc-ID : 1
bond-hash-basis: 0
lb_output action: disabled, bond-id: -1
updelay: 0 ms
downdelay: 0 ms
next rebalance: 8942 ms
lacp_status: configured
lacp_fallback_ab: false
active-backup primary: <none>
active member mac: 00:00:00:00:00:00(none)

member u2: disabled
  may_enable: false

member u3: disabled
  may_enable: false

"""


def _use(mode: str, lacp: str = "off", down: int = 0, senders: int = 9, tunnels: bool = False) -> BondUse:
    members = tuple((f"u{n}", n >= down) for n in range(2))
    return BondUse(OvsBond("bond0", mode, lacp, members), "br1", senders, tunnels)


def _reported(use: BondUse) -> dict[str, str]:
    return {finding.id: finding.status for finding in findings([use])}


def test_bonds_are_read() -> None:
    one, two = parse_bonds(SHOWN)
    assert one == OvsBond("bond0", "active-backup", "off", (("u0", False), ("u1", True)))
    assert (two.mode, two.lacp, two.down) == ("balance-tcp", "configured", ("u2", "u3"))
    assert parse_bonds("") == ()


def test_before_2_16_a_member_was_a_slave() -> None:
    (old,) = parse_bonds("---- b ----\nbond_mode: balance-slb\nslave u0: enabled\n")
    assert old.members == (("u0", True),)


def test_a_link_that_is_down_is_a_warning_while_others_carry_on() -> None:
    assert _reported(_use("active-backup")) == {"bond-hash": "ok"}
    assert _reported(_use("active-backup", down=1)) == {"bond-link-down": "warn", "bond-hash": "ok"}
    (reported, _) = findings([_use("active-backup", down=1)])
    assert "u0 is down; traffic goes on over u1" in reported.found
    dead = _use("active-backup", down=2)
    assert _reported(dead)["bond-link-down"] == "fail" and "all its links" in str(fault(dead.bond))


def test_lacp_that_nobody_answers_is_a_failure() -> None:
    silent = _use("balance-tcp", lacp="configured", down=2)
    assert _reported(silent) == {"bond-lacp": "fail", "bond-hash": "ok"}
    assert "does not answer LACP" in str(fault(silent.bond))
    assert fault(_use("balance-tcp", lacp="negotiated").bond) is None


def test_a_hash_that_cannot_spread_is_a_warning() -> None:
    assert _reported(_use("balance-slb")) == {"bond-hash": "ok"}
    assert _reported(_use("balance-slb", senders=1)) == {"bond-hash": "warn"}
    assert _reported(_use("balance-slb", tunnels=True)) == {"bond-hash": "warn"}
    (reported,) = findings([_use("balance-slb", tunnels=True)])
    assert "one source MAC" in reported.found and "lacp" in str(reported.fix)
    assert _reported(_use("balance-tcp", lacp="negotiated", tunnels=True)) == {"bond-hash": "ok"}
    (reported,) = findings([_use("active-backup")])
    assert "one of its 2 links carries all" in reported.found

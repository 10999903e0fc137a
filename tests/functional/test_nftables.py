"""Tables of nftables on the real kernel, beside other writers. ``nft`` is the judge of what we write."""

from __future__ import annotations

import contextlib
import errno
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from drivers.linuxbridge import filters
from drivers.linuxbridge.apply import Writer
from drivers.linuxbridge.commands import BridgeKernel
from drivers.linuxbridge.filter_commands import RemoveFilter, SetBase, SetFilter
from netplugin.api.errors import HostError
from netplugin.api.models import PortSpec
from netplugin.host import netlink
from netplugin.host.names import TAP, device_name
from netplugin.host.nfnetlink import TransactionRefused
from netplugin.host.nftables import (
    AddElement,
    AddTable,
    Chain,
    Command,
    DeleteChain,
    DeleteElement,
    DeleteTable,
    Nftables,
    SetChain,
    Table,
)
from netplugin.host.vxlan_filter import VxlanFilter, VxlanKey
from tests.lab.processes import run

ADDRESSES = [
    {"ip": "10.0.0.5"},
    {"ip": "10.1.0.0/16", "mac": "52:54:00:00:00:02"},
    {"ip": "10.2.0.0/20"},
    {"ip": "64.0.0.0/3"},
    {"ip": "2001:db8::5"},
    {"ip": "2001:db8:1::/52"},
    {"ip": "2001:db8:2::/64"},
    {"ip": "2000::/3"},
]
SECURITY = {
    "own MAC": {},
    "off": {"enabled": False},
    "addresses": {"allowed_addresses": ADDRESSES},
    "roles": {"allowed_addresses": ADDRESSES[4:6], "roles": ["router", "dhcp_server"]},
}


def soon() -> float:
    return time.monotonic() + 60


def spec(number: int = 1, **security: object) -> PortSpec:
    return PortSpec.model_validate(
        {
            "vm_id": "vm",
            "mac": f"52:54:00:00:{number >> 8:02x}:{number & 255:02x}",
            "backend": "linuxbridge",
            "network": {"type": "flat", "physical_network": "net1"},
            "port_security": security,
        }
    )


def port(number: int, **security: object) -> SetFilter:
    port_id = f"p{number}"
    name = device_name(TAP, port_id)
    return SetFilter((port_id,), name, port_id, spec(number, **security), name)


@pytest.fixture
def table() -> Iterator[Nftables]:
    made = Nftables(filters.FAMILY, filters.TABLE)
    made.commit(SetBase(()).commands(), soon())
    yield made
    with contextlib.suppress(TransactionRefused):
        made.commit([DeleteTable()], soon())


def nft(text: str) -> str:
    return run(["nft", "-s", text])


def read(table: Nftables, chains: list[str] | None = None) -> Table:
    found = table.read(chains, soon())
    assert found is not None
    return found


# -- nft is the judge ------------------------------------------------------------------------------


@pytest.mark.parametrize("security", SECURITY)
def test_nft_lists_what_we_wrote_and_makes_the_same_of_its_own_list(table: Nftables, security: str) -> None:
    one = port(1, **SECURITY[security])  # type: ignore[arg-type]
    table.commit(one.commands(), soon())
    found = read(table)
    assert found.chains[one.name] == filters.port_chain("p1", one.spec)
    assert {name: found.chains[name] for name in filters.BASE} == filters.BASE
    assert found.maps == {"ports": {one.name: one.name}, "services": {}}
    listed = nft("list table bridge netplugin")
    assert "netplugin-port=p1" in listed and "[" not in listed, "nft has words for all of it"
    nft("delete table bridge netplugin")
    run(["nft", "-f", "-"], stdin=listed)
    assert nft("list table bridge netplugin") == listed


def test_what_nft_changes_is_read(table: Nftables) -> None:
    one = port(1)
    table.commit(one.commands(), soon())
    before = read(table)
    assert read(table, []).maps == before.maps
    nft("add chain bridge netplugin mine; add rule bridge netplugin mine quota 10 mbytes counter drop")
    nft("add element bridge netplugin ports { eth7 : drop, npt7 : goto mine }")
    nft("add chain bridge netplugin prerouting { policy drop; }")
    nft(f"add rule bridge netplugin {one.name} accept")
    for chains in (None, [one.name, "mine", "prerouting"]):
        found = read(table, chains)
        assert found.maps["ports"] == {one.name: one.name, "eth7": None, "npt7": None}
        assert found.names == before.names | {"mine"} and len(found.chains["mine"].rules) == 1
        policy_drop = filters.BASE["prerouting"].base.replace(b"\5\0\0\0\0\1", b"\5\0\0\0\0\0")
        assert found.chains["prerouting"].base == policy_drop != before.chains["prerouting"].base
        assert found.chains[one.name].rules[:-1] == before.chains[one.name].rules
    nft("delete table bridge netplugin")
    assert table.read([], soon()) is None and table.read(None, soon()) is None


# -- other writers ---------------------------------------------------------------------------------


def test_tables_of_others_stay_as_they_are(table: Nftables) -> None:
    theirs = (
        "add table bridge theirs; add chain bridge theirs prerouting; add map bridge theirs ports "
        "{ type ifname : verdict; elements = { eth7 : drop } }; "
        "add table inet netplugin; add table ip netplugin"
    )
    nft(theirs)
    try:
        before = [nft(f"list table {name}") for name in ("bridge theirs", "inet netplugin", "ip netplugin")]
        table.commit(port(1).commands(), soon())
        assert read(table).names == {*filters.BASE, port(1).name} and "eth7" not in read(table).maps["ports"]
        table.commit([DeleteTable()], soon())
        assert table.read(None, soon()) is None
        after = [nft(f"list table {name}") for name in ("bridge theirs", "inet netplugin", "ip netplugin")]
        assert before == after
    finally:
        nft("delete table bridge theirs; delete table inet netplugin; delete table ip netplugin")


def test_what_we_wrote_is_not_forgotten_by_a_read_that_fails(
    table: Nftables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next plan misses the chain, and a port that goes leaves its rules behind."""
    read(table, [])  # lists all
    table.commit(port(1).commands(), soon())
    with monkeypatch.context() as patched:
        patched.setattr(Nftables, "_rules", _refuse)
        with pytest.raises(HostError):
            table.read([port(1).name], soon())
    found = read(table, [port(1).name])
    assert port(1).name in found.names and found.chains[port(1).name].rules


def _refuse(*_: object) -> None:
    raise OSError(errno.ENODEV, "No such device")


@pytest.mark.parametrize("own", [None, AddElement("ports", "eth1", None)], ids=["", "beside one of ours"])
@pytest.mark.parametrize("without_effect", [False, True], ids=["", "without effect"])
def test_a_change_of_others_is_never_missed(
    table: Nftables, own: Command | None, without_effect: bool
) -> None:
    """Also right before or after a transaction of ours, which may have changed nothing."""
    for number in range(20):
        if own is not None and without_effect:
            table.commit([own], soon())
        read(table, [])  # lists all
        for ours_first in (True, False):
            key = f"eth{number}{ours_first:d}"
            if own is not None and ours_first:
                table.commit([own], soon())
            nft(f"add element bridge netplugin ports {{ {key} : drop }}")
            if own is not None and not ours_first:
                table.commit([own], soon())
            assert key in read(table, []).maps["ports"]
        if own is not None and not without_effect:
            table.commit([DeleteElement("ports", "eth1")], soon())
            assert "eth1" not in read(table, []).maps["ports"]


def test_a_flush_between_a_look_and_a_write_is_an_error_and_then_seen(table: Nftables) -> None:
    read(table, [])
    nft("flush ruleset")
    with pytest.raises(TransactionRefused, match="No such file"):
        table.commit(port(1).commands(), soon())
    assert table.read([], soon()) is None
    table.commit([*SetBase(()).commands(), *port(1).commands()], soon())
    assert read(table, []).maps["ports"] == {port(1).name: port(1).name}


def test_reads_and_writes_during_others_that_never_stop(table: Nftables) -> None:
    """Who lists a thousand keys must begin again when another program commits meanwhile."""
    table.commit([AddElement("ports", f"eth{number}", None) for number in range(1000)], soon())
    stop = threading.Event()

    def disturb() -> None:
        while not stop.is_set():
            nft("add chain bridge netplugin mine; delete chain bridge netplugin mine")

    disturbers = [threading.Thread(target=disturb) for _ in range(2)]
    for one in disturbers:
        one.start()
    try:
        for number in range(1, 20):
            table.commit(port(number).commands(), soon())
            found = read(table, [port(number).name])
            assert len(found.maps["ports"]) == 1000 + number
            assert found.chains[port(number).name] == filters.port_chain(f"p{number}", spec(number))
            assert len(read(table).maps["ports"]) == 1000 + number
    finally:
        stop.set()
        for one in disturbers:
            one.join()


# -- many ------------------------------------------------------------------------------------------


def test_a_look_at_one_port_is_as_long_with_five_hundred_others(
    table: Nftables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in messages of the kernel. The look after a change of ours has a few more."""
    received: list[int] = []
    numbered = netlink.numbered

    def counted(data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
        for message in numbered(data):
            received.append(1)
            yield message

    def plug_and_look(number: int) -> int:
        received.clear()
        for _ in range(2):
            read(table, [*filters.BASE, port(number).name])
            table.commit(port(number, allowed_addresses=[{"ip": "10.0.0.5"}]).commands(), soon())
        found = read(table, [*filters.BASE, port(number).name])
        assert found.maps["ports"][port(number).name] == port(number).name
        return len(received)

    read(table)
    monkeypatch.setattr(netlink, "numbered", counted)
    alone = plug_and_look(1)
    table.commit([c for n in range(1000, 1500) for c in port(n).commands()], soon())
    read(table)
    assert plug_and_look(2) == alone
    assert len(read(table).maps["ports"]) == 502 and len(received) > 500, "the whole table is really read"


def test_ten_thousand_rules_are_one_transaction(table: Nftables) -> None:
    addresses = [{"ip": f"10.{number >> 8}.{number & 255}.7"} for number in range(1, 65)]
    ports = [port(number, allowed_addresses=addresses) for number in range(60)]
    table.commit([c for one in ports for c in one.commands()], soon())
    found = read(table)
    assert {one.name: found.chains[one.name] for one in ports} == {
        one.name: filters.port_chain(one.port_id, one.spec) for one in ports
    }
    table.commit(
        [c for one in ports for c in (DeleteElement("ports", one.name), DeleteChain(one.name))], soon()
    )
    assert read(table, []).names == set(filters.BASE)


# -- what the kernel refuses -----------------------------------------------------------------------


def test_the_kernel_says_which_command_of_a_transaction_is_wrong(table: Nftables) -> None:
    good = port(1).commands()
    bad: list[Command] = [DeleteElement("ports", "nowhere"), AddElement("ports", "eth7", "no-such-chain")]
    with pytest.raises(TransactionRefused, match="No such file") as refused:
        table.commit([*good, *bad, SetChain("mine", Chain())], soon())
    assert refused.value.refused.keys() == {len(good), len(good) + 1}
    assert refused.value.step == "nftables" and refused.value.fix
    assert read(table).names == set(filters.BASE) and read(table).maps["ports"] == {}


def test_one_bad_port_of_a_batch_fails_alone(table: Nftables) -> None:
    """The others are in the kernel after a second transaction, however many they are."""
    ports = [port(number) for number in range(1, 40)]
    bad = RemoveFilter(("bad",), "", (("ports", "nowhere"),))
    committed: list[int] = []

    class Counted(Nftables):
        def commit(self, commands: list[Command], deadline: float) -> None:  # type: ignore[override]
            committed.append(len(commands))
            super().commit(commands, deadline)

    kernel = BridgeKernel(nft=Counted(filters.FAMILY, filters.TABLE))
    applied = Writer(kernel, soon(), "the-store/7").write([*ports[:20], bad, *ports[20:]])
    assert applied.failed.keys() == {"bad"} and "device nowhere" in applied.failed["bad"].detail
    assert applied.failed["bad"].step == "nftables" and len(committed) == 2
    found = read(table)
    assert found.maps["ports"].keys() == {one.name for one in ports}
    assert filters.store_mark(found.chains) == "the-store/7"


def test_a_map_of_others_with_our_name_is_an_error(table: Nftables) -> None:
    nft("delete table bridge netplugin")
    nft("add table bridge netplugin; add map bridge netplugin ports { type ipv4_addr : verdict; }")
    with pytest.raises(TransactionRefused) as refused:
        table.commit([*SetBase(()).commands(), *port(1).commands()], soon())
    assert "another program" in str(refused.value.fix)
    found = read(table)
    assert found.names == frozenset() and found.maps == {"ports": {}}


def test_who_may_not_change_the_network_is_reported(table: Nftables) -> None:
    """As an agent without CAP_NET_ADMIN."""
    program = (
        "import time; from netplugin.host.nftables import *\n"
        "try: Nftables('bridge', 'netplugin').commit([AddTable()], time.monotonic() + 60)\n"
        "except Exception as error: print(error)\n"
        "try: Nftables('bridge', 'netplugin').read(None, time.monotonic() + 60)\n"
        "except Exception as error: print(error)\n"
    )
    printed = run(
        ["setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin", sys.executable, "-c", program]
    )
    assert len(printed.splitlines()) == 2 and all("not permitted" in line for line in printed.splitlines())
    assert "CAP_NET_ADMIN" in printed
    table.commit([AddTable()], soon())


# -- who may send into VXLAN networks --------------------------------------------------------------


@pytest.mark.parametrize(
    ("local", "peers"), [("10.1.0.1", ["10.1.0.2", "10.1.0.3"]), ("fd00::1", ["fd00::2", "fd00::3"])]
)
def test_peers_are_what_nft_lists(local: str, peers: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    blue, red = VxlanKey(4789, 5001), VxlanKey(8472, 0xFFFFFF)
    sources = VxlanFilter(local)
    assert sources.read(soon()) is None
    with monkeypatch.context() as without_nft:
        without_nft.setenv("PATH", "/nowhere")
        sources.allow(blue, peers, [], soon(), base=True)
    found = sources.read(soon())
    assert found and found.sound and found.networks == {blue} and found.peers_of(blue) == set(peers)
    listed = nft("list table inet netplugin")
    assert f"4789 . 0x1389 . {peers[1]}" in listed and "typeof udp dport . @th,96,24 . ip" in listed
    nft("delete table inet netplugin")
    run(["nft", "-f", "-"], stdin=listed)
    assert nft("list table inet netplugin") == listed
    assert sources.read(soon()) == found, "what nft makes of its list is the same"
    many = [f"{peers[0][:-1]}{number}" for number in range(4, 10)]
    sources.allow(red, many, [], soon(), base=False)
    sources.allow(blue, peers[1:], peers[:1], soon(), base=False)
    found = sources.read(soon())
    assert found and found.peers_of(red) == set(many) and found.peers_of(blue) == {peers[1]}
    for change in ("flush chain inet netplugin input", "insert rule inet netplugin input accept"):
        nft(change)
        assert not sources.read(soon()).sound  # type: ignore[union-attr]
        sources.allow(blue, peers[1:], [], soon(), base=True)
        assert sources.read(soon()) == found
    sources.forget(red, many, soon())
    assert sources.read(soon()).networks == {blue}  # type: ignore[union-attr]
    sources.remove(soon())
    assert sources.read(soon()) is None


WORDS = {
    "10.1.0.1": "udp dport . @th,96,24 @networks udp dport . @th,96,24 . ip saddr != @peers4",
    "fd00::1": "udp dport . @th,96,24 @networks udp dport . @th,96,24 . ip6 saddr != @peers6",
}
NO_FRAGMENTS = (
    *(f"ip6 daddr fd00::1 frag nexthdr {header}" for header in (0, 43, 44, 51, 60)),
    "ip6 daddr fd00::1 exthdr frag exists udp dport @ports",
)


@pytest.mark.parametrize("local", WORDS)
def test_the_rules_of_networks_are_those_that_nft_makes_of_its_words(local: str) -> None:
    """Rules written by ``nft`` before, with other comments and an anonymous set, are replaced."""
    version = "6" if ":" in local else "4"
    sources, key, peer = VxlanFilter(local), VxlanKey(4789, 5001), f"{local[:-1]}2"
    words = [*(NO_FRAGMENTS if version == "6" else ()), WORDS[local]]
    older = [words[-1], *(["ip6 daddr fd00::1 frag nexthdr { 0, 43, 44, 51, 60 }"] if version == "6" else [])]
    for rules, ending, sound in ((words, "", True), (older, ' comment "netplugin-1"', False)):
        nft(
            "add table inet netplugin; add set inet netplugin ports { type inet_service; }; "
            "add set inet netplugin networks { typeof udp dport . @th,96,24; }; add set inet netplugin "
            f"peers{version} {{ typeof udp dport . @th,96,24 . ip{version.replace('4', '')} saddr; }}; "
            "add chain inet netplugin input { type filter hook input priority -350; }; "
            + "; ".join(f"add rule inet netplugin input {rule} counter drop{ending}" for rule in rules)
        )
        found = sources.read(soon())
        assert found and found.sound == sound
        sources.allow(key, [peer], [], soon(), base=True)
        assert sources.read(soon()).sound  # type: ignore[union-attr]
        sources.remove(soon())


def test_thousands_of_peers_are_one_transaction() -> None:
    sources, key = VxlanFilter("10.1.0.1"), VxlanKey(4789, 5001)
    peers = [f"10.{number >> 8}.{number & 255}.7" for number in range(3000)]
    sources.allow(key, peers[:1], [], soon(), base=True)
    sources.allow(key, peers, [], soon(), base=False)
    found = sources.read(soon())
    assert found and found.peers_of(key) == set(peers)
    sources.forget(key, peers, soon())
    sources.remove(soon())


def test_a_table_of_another_kind_has_no_sound_rules() -> None:
    elements = "type ipv4_addr; elements = { 10.0.0.1 }"
    nft(f"add table inet netplugin; add set inet netplugin networks {{ {elements} }}")
    try:
        found = VxlanFilter("10.1.0.1").read(soon())
        assert found and not found.sound and found.networks == set()
        with pytest.raises(TransactionRefused, match="File exists") as refused:
            VxlanFilter("10.1.0.1").allow(VxlanKey(4789, 1), ["10.1.0.2"], [], soon(), base=True)
        assert refused.value.step == "vxlan-filter"
    finally:
        subprocess.run(["nft", "delete table inet netplugin"], check=True)

"""What the product reads and has not written itself: each reader, samples for it, and its typed errors."""

from __future__ import annotations

import json
import re
import struct
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml
from netplugin_zeroloss import journal as run_journal
from netplugin_zeroloss.generators import exec, trex_stf
from netplugin_zeroloss.loss import ovs as loss_ovs
from netplugin_zeroloss.matrix import description
from netplugin_zeroloss.values import GeneratorError, UnusableInput
from netplugin_zeroloss.vnf import vpp_api
from netplugin_zeroloss.vnf.contract import VnfError
from oslo_config import cfg
from pyroute2.netlink.rtnl import RTM_GETADDR, RTM_GETLINK
from pyroute2.netlink.rtnl.ifaddrmsg import ifaddrmsg
from pyroute2.netlink.rtnl.marshal import MarshalRtnl

from agents.configuration import load
from agents.store.store import Store
from netplugin.api.errors import NetpluginError
from netplugin.host import (
    cpus,
    fdb,
    link_messages,
    netlink,
    nft_rules,
    nftables,
    rtnetlink,
    rtnetlink_messages,
    tc,
    vf_messages,
)
from netplugin.host import openflow_messages as openflow
from netplugin.host.flow import Flow
from netplugin.host.nfnetlink import HEAD, unpacked
from netplugin.host.ovs_bonds import parse_bonds
from netplugin.host.oxm import Malformed, read_fields
from netplugin.libvirt.domain import complete, parse_domain
from netplugin.libvirt.guest import read_domain
from netplugin.libvirt.needs import read_needs
from netplugin.pmd.read import parse_counters, parse_threads
from netplugin.pmd.settings import read_affinity, read_settings
from netplugin.programs import bounded
from netplugin.tuning.applying import journal as tuning_journal
from netplugin.tuning.steps import Group, OtherConfig
from tests.lab import in_memory
from tests.unit.agents.test_store import record
from tests.unit.core.openflow_flows import of_filters, of_tunnels, statistics
from tests.unit.core.test_nftables import MAC, as_the_kernel_reports
from tests.unit.core.test_ovs_bonds import SHOWN
from tests.unit.drivers.vf.test_vf_primitives import FULL, link_of, vf_info
from tests.unit.kernel_answers import packet
from tests.unit.tuning.placing.test_hostile_domain import VM
from tests.unit.zeroloss.matrix_runs import with_agent
from tests.unit.zeroloss.test_matrix_journal import _write as write_run

#: An option in the sample of a configuration, where all are comments; one without a default has no value.
_OPTION = re.compile(r"#\w+ = (?!<None>)")
DATA = Path(__file__).resolve().parents[2] / "data"
ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Parser:
    """``read`` gets the bytes of an input; ``errors`` are all that it may raise."""

    name: str
    samples: Callable[[], Sequence[bytes]]
    read: Callable[[bytes], object]
    errors: tuple[type[Exception], ...] = ()
    #: The time of an input of this parser in units of 0.1 ms: each parser gets the same share of the time.
    cost: int = 1


def _text(data: bytes) -> str:
    """As programs' output is read."""
    return data.decode(errors="replace")


def _files(*patterns: str) -> Callable[[], Sequence[bytes]]:
    return lambda: [file.read_bytes() for p in patterns for file in sorted(DATA.glob(p))]


# -- Open vSwitch ----------------------------------------------------------------------------------


def _pmd(data: bytes) -> object:
    text = _text(data)
    counted = [each.busy_percent for each in parse_counters(text).values()]
    return parse_threads(text), counted


def _pmd_settings(data: bytes) -> object:
    text = _text(data)
    return read_settings({"pmd-cpu-mask": text, "pmd-auto-lb-load-threshold": text}), read_affinity(text)


def _openflow(data: bytes) -> None:
    for message in openflow.split(bytearray(data)):
        if message.kind == openflow.ERROR:
            openflow.error_name(message)
        elif message.kind == openflow.GET_CONFIG_REPLY:
            openflow.fragments_matched(message)
        elif message.kind != openflow.HELLO:
            for flow in openflow.read_flows([message], ()):
                assert str(flow)
            openflow.read_changes(message)


@cache
def _matches() -> tuple[list[bytes], list[bytes]]:
    flows = sorted([*of_filters(), *of_tunnels()], key=str)
    return [flow.fields for flow in flows], [flow.match.encode() for flow in flows]


@cache
def _openflow_samples() -> list[bytes]:
    flows = sorted([*of_filters(), *of_tunnels()], key=str)
    many = [statistics(*flows[at : at + 7], more=at % 2 == 0) for at in range(0, len(flows), 7)]
    error = openflow.message(openflow.ERROR, 3, struct.pack(">HH", 17, 14))
    config = openflow.message(openflow.GET_CONFIG_REPLY, 4, struct.pack(">HH", 3, 0))
    return [*many, openflow.hello(1) + error + config]


def _words_of_match(data: bytes) -> None:
    flow = Flow.make(0, 0, _text(data))
    assert Flow.make(0, 0, flow.match) == flow, "its own words are another match"


# -- the kernel ------------------------------------------------------------------------------------


@cache
def _links() -> list[bytes]:
    """What this kernel says of its devices, and a NIC with VFs."""
    kernel = rtnetlink.Rtnetlink()
    found = kernel.ask(RTM_GETLINK, rtnetlink.about_link(), rtnetlink.DUMP)[:20]
    found += kernel.ask(RTM_GETADDR, ifaddrmsg(), rtnetlink.DUMP)[:20]
    vfs = netlink.attribute(22, vf_info(0, FULL, statistics=True), vf_info(3, FULL))
    data = netlink.attribute(1, b"vxlan\0") + netlink.attribute(2, _vxlan())
    made = [link_of(7, "eth0", vfs), link_of(8, "eth0", netlink.attribute(18, data))]
    return [*(each.data for each in found), *(packet(16, body) for body in made)]


def _vxlan() -> bytes:
    pairs = {1: b"\1\0\0\0", 4: b"\n\0\0\1", 5: b"\0", 7: b"\1", 15: b"\x12\xb5", 29: b"\1"}
    return b"".join(netlink.attribute(kind, value) for kind, value in pairs.items())


def _of_links(data: bytes) -> None:
    readers: Sequence[Callable[[rtnetlink_messages.Message], object]] = (
        *(link_messages.identity, link_messages.read_link, link_messages.read_bridge_port),
        *(link_messages.read_bond_member, link_messages.read_address, link_messages.link_event),
        *(link_messages.bridge_port_event, link_messages.port_event),
        *(vf_messages.parse_link, vf_messages.parse_counters, fdb._fixed),
        *(tc._tbf, tc._target, lambda message: tc._guard([message])),
    )
    with suppress(NetpluginError), netlink.translated("read", "device", _refused):
        for message in filter(None, rtnetlink_messages.received([data], MarshalRtnl.msg_map)):
            for reader in readers:
                with suppress(NetpluginError), netlink.translated("read", "device", _refused):
                    reader(message)


def _refused(error_text: str, code: int) -> NetpluginError:
    return NetpluginError(error_text, step="read")


@cache
def _rules() -> list[bytes]:
    rule = nft_rules.Rule.make(MAC, nft_rules.COUNTER, nft_rules.DROP, comment="port p1")
    texts = netlink.attribute(1, b"netplugin\0") + netlink.attribute(2, b"p1\0")
    body = texts + netlink.attribute(4, as_the_kernel_reports(rule)) + netlink.attribute(7, rule.userdata)
    hook = netlink.attribute(4, netlink.attribute(1, b"\0\0\0\0"), netlink.attribute(2, b"\xff\xff\xff\x38"))
    chain = netlink.attribute(1, b"netplugin\0") + netlink.attribute(3, b"forward\0") + hook
    key = netlink.attribute(1, netlink.attribute(1, netlink.attribute(1, b"npt0\0".ljust(16, b"\0"))))
    elements = netlink.attribute(3, key + netlink.attribute(1, b""))
    return [packet(0, bytes(4) + each) for each in (body, chain, elements)]


def _of_rules(data: bytes) -> None:
    for *_, message in netlink.numbered(data):
        with suppress(NetpluginError), netlink.translated("read", "nftables", _refused):
            found = [b"", *unpacked(message, 7, netlink.HEADER_BYTES + HEAD)]
            nft_rules.Rule.read(found[4], found[7])
            nftables._chain(found)
            list(nftables._elements([found]))


def _cpus(data: bytes) -> None:
    for read in (cpus.parse_list, cpus.from_mask, cpus.from_kernel):
        with suppress(ValueError):
            assert len(tuple(read(_text(data)))) < 1 << 20  # type: ignore[operator]


# -- libvirt ---------------------------------------------------------------------------------------


def _domain(data: bytes) -> None:
    text = _text(data)
    with suppress(NetpluginError):
        read_domain(text)
    domain = parse_domain(text, "render")
    with suppress(NetpluginError):
        read_needs(domain, "render")
    complete(domain, VM.bindings)


# -- files -----------------------------------------------------------------------------------------


@cache
def _configuration() -> list[bytes]:
    lines = (ROOT / "etc/netplugin.conf").read_text().splitlines()
    kept = [line.removeprefix("#") for line in lines if line.startswith("[") or _OPTION.match(line)]
    return ["\n".join(kept).encode()]


def _conf(data: bytes) -> None:
    with tempfile.NamedTemporaryFile(prefix=in_memory.PREFIX, dir=in_memory.PLACE) as file:
        file.write(data)
        file.flush()
        load([Path(file.name)])


@cache
def _stores() -> list[bytes]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "agent.db"
        with closing(Store(path)) as store:
            store.save([record(f"p{n}") for n in range(20)])
        return [path.read_bytes()]


def _store(data: bytes) -> None:
    """A damaged file is moved aside; a row that cannot be read is set aside."""
    with in_memory.directory() as directory:
        path = Path(directory) / "agent.db"
        path.write_bytes(data)
        with closing(Store(path)) as store:
            assert all(found.spec is not None for found in store.records())
            store.claims()


@cache
def _run_journals() -> list[bytes]:
    with tempfile.TemporaryDirectory() as directory:
        write_run(Path(directory))
        return [(Path(directory) / run_journal.FILE).read_bytes()]


def _run_journal(data: bytes) -> None:
    with in_memory.directory() as directory:
        (Path(directory) / run_journal.FILE).write_bytes(data)
        run_journal.read_run(Path(directory))


@cache
def _tuning_journals() -> list[bytes]:
    event, group = tuning_journal.JournalEvent, Group.OVS
    target = OtherConfig("pmd-cpu-mask")
    written = tuning_journal.line(event.WRITING, "b1", group, target, before="0x3", desired="0xc")
    return ["\n".join([written, tuning_journal.line(event.WRITTEN, "b1", group, target), ""]).encode()]


def _tuning_journal(data: bytes) -> None:
    tuning_journal._read(Path("journal"), data, "b1")


def _runs() -> list[bytes]:
    return [yaml.safe_dump(with_agent(matrix={"backends": ["a"], "frames": ["imix"]})).encode()]


# -- TRex and VPP ----------------------------------------------------------------------------------


def _stf(data: bytes) -> None:
    text = _text(data)
    for read in (trex_stf.parse_stf, trex_stf.expected_pps, trex_stf.clock_s):
        with suppress(GeneratorError):
            read(text)
    trex_stf.parse_interrupted(text, 1e6)


def _stl(data: bytes) -> None:
    """What it says to the tool is read as that of any other program."""
    answer = bounded.parse(data)
    bounded.validated(answer, exec._MEASUREMENT)
    bounded.validated(answer, exec._HELLO)


_STL = {
    "ok": True,
    "name": "TRex",
    "tx_packets": 9,
    "rx_packets": 8.0,
    "elapsed_s": 1.5,
    "directions": [{"tx_packets": 9, "rx_packets": 8}],
    "latencies": [{"samples": 1, "p50_us": 1.0, "p90_us": 2.0, "p99_us": 3.0, "max_us": 4.0}],
    "progress": [{"tx_packets": 1, "rx_packets": 1, "elapsed_s": 0.5}],
    "evidence": {"generator.rx": 1},
}


def _vpp(data: bytes) -> None:
    text = _text(data)
    with suppress(VnfError):
        vpp_api.reading([0], text, text, text)


def _loss(data: bytes) -> None:
    text = _text(data)
    loss_ovs.parse_ports(text)
    loss_ovs.reading({}, text, text, text, text)
    loss_ovs.parse_drops(text)
    loss_ovs.parse_upcalls_lost(text)


PARSERS = [
    Parser("dpif-netdev", _files("pmd/ovs-*/*.txt", "ovs-3.1/*pmd*", "ovs-3.1/*rxq*"), _pmd, cost=5),
    Parser("pmd settings", lambda: [b"0x3c", b"0:2,1:3", b"80"], _pmd_settings),
    Parser("bond/show", lambda: [SHOWN.encode()], lambda data: parse_bonds(_text(data))),
    Parser("counters of OVS", _files("ovs-3.1/*.txt"), _loss, cost=8),
    Parser("OpenFlow", _openflow_samples, _openflow, (Malformed,), cost=2),
    Parser("OXM", lambda: _matches()[0], read_fields, (Malformed,)),
    Parser("words of matches", lambda: _matches()[1], _words_of_match, (Malformed,)),
    Parser("rtnetlink", _links, _of_links, cost=4),
    Parser("nfnetlink", _rules, _of_rules),
    Parser("CPU lists", lambda: [b"0-3,8", b"0x3c", b"ff,00000001"], _cpus, cost=2),
    Parser("domains", lambda: [VM.xml.encode()], _domain, (NetpluginError,), cost=2),
    Parser("configuration", _configuration, _conf, (cfg.Error, ValueError, OSError), cost=25),
    Parser("store", _stores, _store, (ValueError, OSError, NetpluginError), cost=45),
    Parser("journal of a run", _run_journals, _run_journal, (UnusableInput,), cost=6),
    Parser("journal of a tuning", _tuning_journals, _tuning_journal, (NetpluginError,)),
    Parser(
        "run description", _runs, lambda data: description.read(_text(data), "run"), (UnusableInput,), cost=25
    ),
    Parser("TRex, stateful", _files("trex-3.08/stf_*.txt"), _stf, (GeneratorError,), cost=30),
    Parser("the protocol of exec", lambda: [json.dumps(_STL).encode()], _stl, (bounded.Unreadable,)),
    Parser("VPP", _files("vpp-26.06/*.txt"), _vpp, cost=3),
]

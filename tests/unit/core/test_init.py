"""``netplugin init``: the options it writes, what it refuses, and what it says is missing."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oslo_config import cfg, types

from netplugin.api.errors import InvalidRequest
from netplugin.cli import init
from netplugin.cli.init_plan import (
    Setting,
    check_free,
    edited,
    missing,
    settings,
    spec_of,
)
from netplugin.tuning.facts import Live, OvsLive
from netplugin.tuning.root import known
from tests.docs.blocks import ROOT
from tests.unit.core.test_cli import Run
from tests.unit.tuning.golden import facts_of

SAMPLE = (ROOT / "etc/netplugin.conf").read_text()
LIST = types.List(item_type=types.String(quotes=True))
DPDK, NIC = "dpdkvhostuser", "0000:03:00.0"
AF_PACKET = "net_af_packet0,iface=eth1"


def asked(
    *backends: str,
    network: str = "physnet1",
    bridge: str | None = None,
    uplinks: tuple[str, ...] = (),
    vfs: tuple[str, ...] = (),
) -> list[Setting]:
    return list(settings(backends, network, spec_of(backends, network, bridge, uplinks, vfs)))


def values(text: str, directory: Path) -> dict[str, dict[str, list[str]]]:
    """The options of a file as oslo.config reads them."""
    file = directory / "read.conf"
    file.write_text(text)
    sections: dict[str, dict[str, list[str]]] = {}
    cfg.ConfigParser(str(file), sections).parse()
    return sections


# -- the file ------------------------------------------------------------------------------------


def test_options_follow_their_comments_and_all_else_stays() -> None:
    of = asked(DPDK, "linuxbridge", uplinks=(NIC, "eth1"))
    new = edited(SAMPLE, of)
    added = [line for line in new.splitlines() if line not in SAMPLE.splitlines()]
    assert added == [
        "enabled_backends = dpdkvhostuser,linuxbridge",
        "physical_interfaces = physnet1:eth1",
        "bridge_mappings = physnet1:br-physnet1",
        f"uplinks = physnet1:{NIC}",
    ]
    assert [line for line in new.splitlines() if line not in added] == SAMPLE.splitlines()
    lines = new.splitlines()
    assert lines[lines.index(added[2]) - 1] == "#bridge_mappings ="
    assert edited(new, of) == new


def test_a_second_network_is_added_to_the_first(tmp_path: Path) -> None:
    text = edited(edited("", asked(DPDK, uplinks=(NIC,))), asked("sriov", network="net2", vfs=("eth2",)))
    text = edited(text, asked("vdpa", network="net3", bridge="br3", uplinks=(AF_PACKET,), vfs=("eth3#0-7",)))
    found = values(text, tmp_path)
    assert found["agent"]["enabled_backends"] == ["dpdkvhostuser,sriov,vdpa"]
    assert found["ovs"]["bridge_mappings"] == ["physnet1:br-physnet1,net3:br3"]
    assert LIST(found["ovs"]["uplinks"][0]) == [f"physnet1:{NIC}", f"net3:{AF_PACKET}"]
    assert found["sriov"]["devices"] == ["net2:eth2,net3:eth3#0-7"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("[ovs]\nbridge_mappings = a:b\n", "[ovs]\nbridge_mappings = a:b,physnet1:br-physnet1\n"),
        ("[OVS]\nbridge-mappings: 'a:b'\n", "[OVS]\nbridge_mappings = a:b,physnet1:br-physnet1\n"),
        (
            "[ovs]\nbridge_mappings = a:b,\n  c:d\n\n[x]\n",
            "bridge_mappings = a:b,c:d,physnet1:br-physnet1\n\n",
        ),
        (
            "[ovs]\nbridge_mappings = a:b\nbridge_mappings = c:d\n",
            "= a:b\nbridge_mappings = c:d,physnet1:br-",
        ),
        ("[ovs]\nlocal_ip = ::1", "[ovs]\nbridge_mappings = physnet1:br-physnet1\nlocal_ip = ::1"),
        ("[ovs]\nbridge_mappings =\n", "[ovs]\nbridge_mappings = physnet1:br-physnet1\n"),
        ("[x]\nbridge_mappings = a:b", "a:b\n\n[agent]\nenabled_backends = dpdkvhostuser\n\n[ovs]\nbridge_"),
    ],
)
def test_each_form_of_a_file(before: str, after: str) -> None:
    assert after in edited(before, asked(DPDK))


LINES = st.sampled_from(
    [
        *(
            "[ovs]",
            "[agent]",
            "[api]",
            "#bridge_mappings =",
            "; a comment",
            "",
            "timeout = 7",
            "bind_port: 1",
        ),
        *("bridge_mappings = a:b", "bridge_mappings = 'a:b,c:d'", "enabled_backends = sriov,", "uplinks ="),
        *("uplinks = '\"a:net_af_packet0,iface=x\"'", "bridge_mappings = a:b,\n c:d", "bond\u2028s = a:lacp"),
    ]
)


@given(st.lists(LINES, max_size=12))
def test_oslo_reads_what_was_written_and_the_rest_as_before(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str]
) -> None:
    directory = tmp_path_factory.getbasetemp()
    text = "\n".join(["[ovs]", *lines])
    before, after = values(text, directory), values(edited(text, asked(DPDK, uplinks=(NIC,))), directory)
    for group, option, entry in (
        ("agent", "enabled_backends", DPDK),
        ("ovs", "bridge_mappings", "physnet1:br-physnet1"),
        ("ovs", "uplinks", f"physnet1:{NIC}"),
    ):
        old = "\n".join(before.get(group, {}).pop(option, ["", ""])[-1:])
        new = after[group].pop(option)[-1]
        assert [e for e in LIST(new) if e != entry] == [e for e in LIST(old) if e != entry]
        assert entry in LIST(new)
    assert {k: v for k, v in after.items() if v} == {k: v for k, v in before.items() if v}


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: asked("linuxbridge", uplinks=(NIC,)), f"--uplink: ['{NIC}'] is for OVS-DPDK"),
        (lambda: asked(DPDK, uplinks=("eth1",)), "--uplink: ['eth1'] is no device of"),
        (lambda: asked("linuxbridge", uplinks=("eth1", "eth2")), "--uplink: a Linux bridge has one"),
        (lambda: asked("linuxbridge", uplinks=("eth1/../x",)), "--uplink: must be 1 to 15"),
        (lambda: asked(DPDK, uplinks=("0000:03:00.9",)), "--uplink: must be a PCI address"),
        (lambda: asked(DPDK, uplinks=(NIC, NIC)), "--uplink: a device may be listed once"),
        (lambda: asked(DPDK, bridge="a bridge"), "--bridge: must be"),
        (lambda: asked("linuxbridge", bridge="br1"), "--bridge: is that of OVS"),
        (lambda: asked(DPDK, network="phys net"), "--physical-network: must be"),
        (lambda: asked(DPDK, network="a\n[api]"), "--physical-network: must be"),
        (lambda: asked("sriov"), "--vf-device: is required"),
        (lambda: asked("sriov", vfs=("eth1#x",)), "--vf-device: must be"),
    ],
)
def test_a_wrong_flag_is_named(make: Callable[[], object], named: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        make()
    assert named in refused.value.detail and "Nothing was changed" in str(refused.value)


@pytest.mark.parametrize(
    ("text", "of", "named"),
    [
        (
            "[ovs]\nbridge_mappings = physnet1:br0",
            asked(DPDK, bridge="br1"),
            "--bridge: physnet1:br1: the fil",
        ),
        ("[ovs]\nuplinks = physnet1:0000:04:00.0", asked(DPDK, uplinks=(NIC,)), f"--uplink: physnet1:{NIC}"),
        (
            '[ovs]\nuplinks = "physnet1:a',
            asked(DPDK, uplinks=(NIC,)),
            "--config-file: [ovs] uplinks of the",
        ),
    ],
)
def test_what_the_file_has_is_not_replaced(text: str, of: list[Setting], named: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        edited(text, of)
    assert named in refused.value.detail


def test_defaults_give_way_to_the_file() -> None:
    text = edited("", asked(DPDK, "linuxbridge", bridge="br9", uplinks=("eth1",)))
    assert edited(text, asked(DPDK, "linuxbridge")) == text


def test_an_uplink_of_the_host_is_refused() -> None:
    for spec, used in (
        (spec_of([DPDK], "n", None, ["0000:0A:00.0"], []), "0000:0a:00.0"),
        (spec_of(["linuxbridge"], "n", None, ["eth1"], []), "eth1"),
    ):
        check_free(spec, {"eth0", "0000:0a:00.1"})
        with pytest.raises(InvalidRequest, match=f"--uplink: {used} carries.*--allow-in-use"):
            check_free(spec, {used})


# -- what is missing -----------------------------------------------------------------------------


def steps(live: Live, debian: bool, has_ovs: bool, pages: int) -> list[str]:
    facts = facts_of("published")
    pools = tuple(replace(pool, total=pages) for pool in known(facts.memory.pools, ()))
    facts = replace(facts, memory=replace(facts.memory, pools=pools))
    spec = spec_of([DPDK], "n", None, [], [])
    return [command for _, commands in missing(spec, facts, live, debian, has_ovs) for command in commands]


def test_a_bare_host_needs_everything_and_a_ready_one_nothing() -> None:
    found = steps(Live(), debian=True, has_ovs=False, pages=0)
    names = ["echo", "apt-get", "update-alternatives", "ovs-vsctl", "systemctl"]
    assert [command.partition(" ")[0] for command in found] == names
    assert found[0] == "echo 1024 > /sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages"
    found = steps(Live(), debian=False, has_ovs=True, pages=8)
    assert found[-1] == "systemctl restart openvswitch" and len(found) == 2
    live = Live(ovs=OvsLive("3.1.0", "22.11", True, {}))
    assert steps(live, debian=True, has_ovs=True, pages=8) == []


# -- the command ---------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The sample as a package installs it, for a command line without a terminal."""
    monkeypatch.setattr(init, "_used", lambda network: {"eth0"})
    monkeypatch.setattr(init, "_check", lambda path, draft: None)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    file = tmp_path / "etc/netplugin.conf"
    file.parent.mkdir(mode=0o755)
    file.write_text(SAMPLE)
    file.chmod(0o640)
    return file


FLAGS = "init --backend linuxbridge --physical-network physnet1"


def test_the_command_writes_once(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(capsys)
    assert run(f"{FLAGS} --config-file {config} --dry-run") == 0
    assert "+physical_interfaces = physnet1:" in run.out and "Nothing was written" in run.out
    assert config.read_text() == SAMPLE
    before = os.umask(0o077)
    try:
        assert run(f"{FLAGS} --config-file {config}") == 0
    finally:
        os.umask(before)
    assert f"Wrote {config}" in run.out and "netplugin port put nic1" in run.out
    assert "enabled_backends = linuxbridge\n" in config.read_text()
    assert stat.S_IMODE(config.stat().st_mode) == 0o640
    inode = config.stat().st_ino
    link = config.with_name("link.conf")
    link.symlink_to(config)
    assert run(f"{FLAGS} --config-file {link}") == 0 and "has these options already" in run.out
    assert config.stat().st_ino == inode and link.is_symlink()
    assert [each.name for each in config.parent.iterdir() if each.name.startswith(".")] == []
    new = config.parent / "below/new.conf"
    assert run(f"{FLAGS} --config-file {new}") == 0
    assert stat.S_IMODE(new.stat().st_mode) == 0o600 and stat.S_IMODE(new.parent.stat().st_mode) == 0o755


@pytest.mark.parametrize(
    ("spoil", "flags", "named"),
    [
        (lambda file: file.chmod(0o660), FLAGS, "can be written by others"),
        (lambda file: file.parent.chmod(0o777), FLAGS, "can be written by others"),
        (lambda file: os.link(file, file.with_name("other")), FLAGS, "hard links"),
        (lambda file: file.write_bytes(b"\xff"), FLAGS, "--config-file"),
        (lambda file: None, f"{FLAGS} --uplink eth0", "--uplink: eth0 carries"),
        (lambda file: None, "init --physical-network physnet1", "--backend: is required without a terminal"),
        (lambda file: None, "init --backend linuxbrige --physical-network p", "did you mean linuxbridge?"),
        (lambda file: None, "init --backend vdpa", "--physical-network: is required"),
    ],
)
def test_a_refusal_changes_nothing(
    config: Path, capsys: pytest.CaptureFixture[str], spoil: Callable[[Path], None], flags: str, named: str
) -> None:
    spoil(config)
    before = config.read_bytes()
    run = Run(capsys)
    assert run(f"{flags} --config-file {config}") == 1
    assert named in run.err
    assert config.read_bytes() == before and len(list(config.parent.iterdir())) <= 2


def test_the_agent_checks_the_new_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, run = tmp_path / "netplugin.conf", Run(capsys)
    file.write_text("[ovs]\ntimeout = x\n[agnt]\n")
    assert run(f"{FLAGS} --config-file {file}") == 1
    assert f"would not be valid: [ovs] option timeout in {file}" in run.err, run.err
    assert f"; {file}: there is no section [agnt]" in run.err
    assert file.read_text() == "[ovs]\ntimeout = x\n[agnt]\n"


@pytest.mark.parametrize(
    ("shown", "command"),
    [
        ("LoadState=loaded\nActiveState=inactive\n", "systemctl enable --now netplugin-agent"),
        ("LoadState=loaded\nActiveState=active\n", "systemctl restart netplugin-agent"),
        ("LoadState=not-found\nActiveState=inactive\n", "netplugin-agent --config-file "),
    ],
)
def test_what_starts_the_agent(
    config: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    shown: str,
    command: str,
) -> None:
    monkeypatch.setattr(init, "run", lambda *args, **given: shown)
    run = Run(capsys)
    assert run(f"{FLAGS} --config-file {config}") == 0
    assert f"\n   {command}" in run.out
    assert run(f"{FLAGS} --config-file {config}") == 0
    assert (command in run.out) is ("restart" not in command)


@pytest.mark.parametrize(
    ("answers", "options"),
    [
        ("\n\n\n\n", {"agent": ["linuxbridge"], "linuxbridge": ["physnet1:"]}),
        (
            "sriov, linuxbridge\nnet2\neth7\neth8\nyes\n",
            {"agent": ["sriov,linuxbridge"], "sriov": ["net2:eth8"]},
        ),
        ("linuxbridge\nnet2\n\nno\n", {}),
        ("linuxbridge\n", None),
    ],
)
def test_the_questions(
    config: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    answers: str,
    options: Mapping[str, list[str]] | None,
) -> None:
    terminal = io.StringIO(answers)
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdin", terminal)
    run = Run(capsys)
    assert run(f"init --config-file {config}") == (1 if options is None else 0)
    found = {group: its for group, its in values(config.read_text(), config.parent.parent).items() if its}
    for group, value in (options or {}).items():
        assert value in found[group].values()
    assert options or not found

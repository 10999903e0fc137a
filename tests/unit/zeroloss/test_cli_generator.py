"""Options of `search` become the description of a generator, or are refused by their names."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

import pytest
from netplugin_zeroloss.cli.main import main
from netplugin_zeroloss.cli.options import GENERATORS, add_generator, description_of
from netplugin_zeroloss.generators.choose import Exec, Sim, Tcpreplay, TrexStf, TrexStl
from netplugin_zeroloss.generators.frames import Vary
from netplugin_zeroloss.machines import SshMachine
from netplugin_zeroloss.values import UnusableInput

from tests.unit.zeroloss.trex import TREE, Trex


def description(options: str) -> Any:
    parser = argparse.ArgumentParser()
    add_generator(parser)
    parser.set_defaults(seed=7, buffer_packets=500)
    return description_of(parser.parse_args(shlex.split(f"--generator {options}")))


def test_simulation_and_program() -> None:
    assert description("sim") == Sim(seed=7)
    assert description("sim --sim-device glitch") == Sim(device="glitch", seed=7)
    assert description("exec --exec-cmd 'a b' --answer-timeout 3") == Exec(command="a b", answer_timeout_s=3)


def test_tcpreplay() -> None:
    one = description("tcpreplay --tx-interface a --rx-interface b")
    assert isinstance(one, Tcpreplay)
    assert [(p.send, p.receive) for p in one.paths] == [("a", "b")]
    assert (one.netns, one.realtime, one.in_flight, one.max_pps) == (None, True, 500, None)
    two = description(
        "tcpreplay --tx-interface a --rx-interface b --tx-interface b --rx-interface a --netns n"
        " --source-ip 10.0.0.1 --source-ip 10.0.1.1 --vary source-port --max-pps 1e5"
        " --destination-mac 02:00:00:00:00:01 --destination-mac 02:00:00:00:00:02"
        " --no-realtime --most-burst 64"
    )
    assert [(p.send, p.receive) for p in two.paths] == [("a", "b"), ("b", "a")]
    assert [str(p.frames.source_ip) for p in two.paths] == ["10.0.0.1", "10.0.1.1"]
    assert [p.frames.destination_mac for p in two.paths] == [f"02:00:00:00:00:0{n}" for n in (1, 2)]
    assert {p.frames.vary for p in two.paths} == {Vary.SOURCE_PORT}
    assert (two.netns, two.realtime, two.most_burst, two.max_pps) == ("n", False, 64, 1e5)


def test_trex() -> None:
    plain = description("trex-stl")
    assert plain == TrexStl(in_flight=500)
    stateless = description(
        "trex-stl --trex-dir /opt/trex --trex-cfg c.yaml --trex-server gen --trex-sync-port 5501"
        " --trex-async-port 5500 --trex-path 0:1 --trex-path 1:0 --trex-force --trex-profile p.py"
        " --trex-argument=--size --trex-argument 128"
    )
    assert isinstance(stateless, TrexStl)
    assert [(p.send, p.receive) for p in stateless.paths] == [(0, 1), (1, 0)]
    assert (stateless.trex_dir, stateless.trex_cfg) == (Path("/opt/trex"), Path("c.yaml"))
    assert (stateless.server, stateless.sync_port, stateless.async_port) == ("gen", 5501, 5500)
    assert stateless.force and stateless.profile == Path("p.py")
    assert stateless.profile_arguments == ("--size", "128")
    batch = description(
        "trex-stf --trex-dir /opt/trex --trex-profile cap2/x.yaml --trex-pps-per-m 1e6"
        " --trex-argument=-c --trex-argument 4"
    )
    assert batch == TrexStf(
        trex_dir=Path("/opt/trex"), profile="cap2/x.yaml", pps_per_m=1e6, arguments=("-c", "4")
    )
    there = description(
        "trex-stf --trex-dir /t --trex-ssh me@gen:2222 --trex-ssh-key /k"
        " --source-mac 02:00:00:00:00:01 --destination-mac 02:00:00:00:00:02"
    )
    machine = SshMachine(type="ssh", host="gen", port=2222, user="me", key="/k")
    assert there.machine == machine and there.macs[0].destination_mac == "02:00:00:00:00:02"


@pytest.mark.parametrize(
    ("options", "option", "why"),
    [
        ("exec", "--exec-cmd", "needs it"),
        ("tcpreplay", "--tx-interface", "needs it"),
        ("tcpreplay --tx-interface a", "--rx-interface", "needs it"),
        ("tcpreplay --tx-interface a --tx-interface b --rx-interface c", "--rx-interface", "2 inter"),
        ("tcpreplay --tx-interface a --rx-interface much-too-long-a-name", "--rx-interface", "15"),
        (
            "tcpreplay --tx-interface a --rx-interface b --source-mac 01:00:00:00:00:01",
            "--source-mac",
            "unicast MAC address",
        ),
        ("tcpreplay --tx-interface a --rx-interface b --source-ip 300.1.1.1", "--source-ip", "300"),
        (
            "tcpreplay --tx-interface a --rx-interface b --source-ip 10.0.0.1 --source-ip 10.0.0.2",
            "--source-ip",
            "2 times for 1 path",
        ),
        (
            "tcpreplay --tx-interface a --rx-interface b --tx-interface a --rx-interface c",
            "--tx-interface",
            "no two paths may send",
        ),
        ("trex-stl --trex-path 0", "--trex-path", "is not like 0:1"),
        ("trex-stl --trex-path 0:1 --trex-path 2:1", "--trex-path", "no two paths may receive"),
        ("trex-stf", "--trex-dir", "needs it"),
        ("trex-stf --trex-dir /x --trex-ssh gen:0", "--trex-ssh", "at least 1"),
        ("trex-stf --trex-dir /x --trex-ssh=-oProxyCommand=x", "--trex-ssh", "name or address of a host"),
        ("trex-stf --trex-dir /x --trex-ssh-key /k", "--trex-ssh-key", "for --trex-ssh"),
        ("trex-stf --trex-dir /x --source-mac 02:00:00:00:00:01", "--source-mac", "0 of --destination-mac"),
        ("sim --trex-dir /x", "--trex-dir", "not for --generator sim"),
        ("trex-stf --trex-dir /x --source-ip 10.0.0.1", "--source-ip", "not for --generator trex-stf"),
        ("trex-stl --tx-interface a", "--tx-interface", "not for --generator trex-stl"),
        ("trex-stl --no-realtime", "--no-realtime", "not for --generator trex-stl"),
        ("sim --answer-timeout 5", "--answer-timeout", "not for --generator sim"),
    ],
)
def test_what_does_not_fit_is_refused(options: str, option: str, why: str) -> None:
    with pytest.raises(UnusableInput) as refused:
        description(options)
    assert refused.value.what == option and why in refused.value.why


def test_the_help_has_a_group_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["search", "--help"])
    shown = capsys.readouterr().out
    assert all(f"--generator {name}" in shown for name in GENERATORS[:-1])


def test_a_search_with_trex(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line is that of TRex's ports: here two of 10 Gbit/s, with a mean frame of 353.8 bytes."""
    trex = Trex(tmp_path / "calls", monkeypatch)
    trex.play("stl_clean_38kpps", seconds=0.2, share_back=1)
    arguments = [
        "search",
        "--generator",
        "trex-stl",
        "--trex-dir",
        str(TREE),
        "--trex-path",
        "0:1",
        "--trex-path",
        "1:0",
        "--mix",
        "imix",
        "--max-trials",
        "1",
    ]
    assert main(arguments) == 1, "one trial is not enough"
    assert "6.6875 Mpps" in capsys.readouterr().err
    assert {s["packet"]["pkt"]["size"] for s in trex.calls("stream")} == {60, 566, 1514}


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["search", "--generator", "trex-stl", "--trex-dir", "/no/such/tree"]
    assert main(arguments) == 2
    assert "--trex-dir: /no/such/tree is no tree of TRex" in capsys.readouterr().err

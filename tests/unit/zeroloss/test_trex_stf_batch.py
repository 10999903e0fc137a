"""Stateful batches of TRex, played by a stand-in: how they are started, stopped and read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from netplugin_zeroloss.generators.choose import PortMacs, TrexStf, make
from netplugin_zeroloss.generators.contract import Generator
from netplugin_zeroloss.generators.trex_stf import clock_s, expected_pps, with_macs
from netplugin_zeroloss.judge import Cause, Verdict, judge
from netplugin_zeroloss.values import GeneratorError, TrialRequest, UnusableInput
from ruamel.yaml import YAML

from tests.unit.zeroloss.stand_ins import SSH, install
from tests.unit.zeroloss.trex import DATA, TREE, Trex

#: What was asked in the recordings.
CLEAN = TrialRequest(20_000, 20)
LOSSY = TrialRequest(60_000, 20)
QUEUE = TrialRequest(2e6, 10)


@pytest.fixture
def trex(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trex:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("netplugin_zeroloss.generators.trex_stf._LOOK_S", 0.1)
    played = Trex(tmp_path / "calls", monkeypatch)
    played.play("stf_clean")
    return played


@contextmanager
def generator(**options: Any) -> Iterator[Generator]:
    with make(TrexStf(trex_dir=TREE, **options)) as made:
        yield made


@pytest.mark.parametrize(
    ("recording", "asked", "verdict", "causes"),
    [
        ("stf_clean", CLEAN, Verdict.PASSED, (None,)),
        ("stf_dut_drop", LOSSY, Verdict.LOSSY, (None,)),
        ("stf_queue_drop", QUEUE, Verdict.INVALID, (Cause.QUEUE,)),
        # Whether it had ended when it was seen to be late, or was stopped then.
        ("stf_stretched_tail", TrialRequest(400e3, 20), Verdict.INVALID, (Cause.LATE, Cause.SHORT)),
    ],
)
def test_real_output_is_judged_as_it_deserves(
    trex: Trex,
    recording: str,
    asked: TrialRequest,
    verdict: Verdict,
    causes: tuple[Cause | None, ...],
) -> None:
    trex.play(recording)
    with generator(pps_per_m=1e6) as tool:
        judged = judge(asked, tool.run(asked), 0.005)
    assert judged.verdict is verdict and judged.cause in causes, judged.reason


def test_how_it_is_started(trex: Trex, tmp_path: Path) -> None:
    configuration = tmp_path / "cfg.yaml"
    configuration.touch()
    with generator(pps_per_m=1e6, trex_cfg=configuration, arguments=("-c", "4")) as tool:
        tool.run(CLEAN)
    [started] = trex.calls()
    assert started["arguments"] == [
        "-f",
        "cap2/imix_64_fast.yaml",
        "-m",
        "0.020000000",
        "-d",
        "20.000",
        "--cfg",
        str(configuration),
        "-c",
        "4",
    ]
    assert started["cwd"] == str(TREE)


def test_a_unit_of_m_is_what_a_short_run_says(trex: Trex) -> None:
    """Two: the first is printed to three digits only."""
    with generator() as tool:
        tool.run(CLEAN)
        tool.run(CLEAN)
    first, second, *trials = [call["arguments"] for call in trex.calls()]
    assert (first[3], first[5]) == ("0.010000000", "3.000")
    assert second[3] == "0.050000000", "so that a number of 100 or more is printed"
    # This stand-in prints 20 kpps whatever it is asked: 400 kpps a unit.
    assert [(trial[3], trial[5]) for trial in trials] == [("0.050000000", "20.000")] * 2


def test_one_run_is_enough_if_it_prints_enough(trex: Trex) -> None:
    trex.play("stf_clean", replace={"20.00 Kpps": "250.00 Kpps"})
    with generator() as tool:
        tool.run(TrialRequest(50_000, 20))
    assert [call["arguments"][3] for call in trex.calls()] == ["0.010000000", "0.002000000"]


@pytest.mark.parametrize(
    ("printed", "found"),
    [("20.00 Kpps", (20e3, 20.0)), ("1.25 Mpps", (1.25e6, 1.25)), ("900.00  pps", (900.0, 900.0))],
)
def test_the_rate_that_is_printed(printed: str, found: tuple[float, float]) -> None:
    assert expected_pps(f" Expected-PPS    :      {printed}  \n") == found


@pytest.mark.parametrize("text", ["", " Expected-PPS    :       0.00  pps  \n"])
def test_a_run_that_does_not_say_its_rate(text: str) -> None:
    with pytest.raises(GeneratorError, match="did not say what it will send"):
        expected_pps(text)


def test_the_clock_that_is_printed() -> None:
    text = (DATA / "trex-3.08" / "stf_clean.txt").read_text()
    assert clock_s(text) == 21.2 and clock_s(text[:2000]) == 0


def test_a_run_that_is_late_is_stopped_and_no_trial(trex: Trex) -> None:
    """Its clock says 21.2 s when it was to take 10. It leaves no summary."""
    trex.play("stf_clean", hangs=True)
    asked = TrialRequest(80_000, 10)
    with generator(pps_per_m=1e6) as tool:
        found = tool.run(asked)
    assert not found.aborted and found.tx_packets < asked.packets
    judged = judge(asked, found, 0.005)
    assert (judged.verdict, judged.cause) == (Verdict.INVALID, Cause.SHORT), judged.reason


def test_a_run_that_dies(trex: Trex) -> None:
    trex.play("stf_clean", dies="EAL: no hugepages")
    with generator(pps_per_m=1e6) as tool, pytest.raises(GeneratorError, match="no hugepages"):
        tool.run(CLEAN)
    with generator() as tool, pytest.raises(GeneratorError, match="no hugepages"):
        tool.run(CLEAN)


def test_another_run_on_the_same_host_is_named(trex: Trex) -> None:
    """DPDK's own words (rte_eal_config_create): the batch has counted nothing, so it is no trial."""
    says = "EAL: Cannot create lock on '/var/run/dpdk/rte/config'. Is another primary process running?"
    trex.play("stf_clean", dies=says)
    with generator(pps_per_m=1e6) as tool, pytest.raises(GeneratorError, match="another primary process"):
        tool.run(CLEAN)


def test_what_it_says_of_itself(trex: Trex) -> None:
    with generator(max_pps=5e6) as tool:
        about = tool.info
    assert (about.can_abort, about.max_pps) == (False, 5e6) and about.min_trial_s >= 10
    assert not trex.calls(), "nothing runs before the first trial"


def test_what_cannot_be(trex: Trex, tmp_path: Path) -> None:
    with pytest.raises(UnusableInput, match="--trex-dir"):
        make(TrexStf(trex_dir=tmp_path))
    with pytest.raises(UnusableInput, match=r"--trex-profile: .*cap2/none.yaml: no such file"):
        make(TrexStf(trex_dir=TREE, profile="cap2/none.yaml"))
    with pytest.raises(UnusableInput, match="--trex-cfg: /no/such: no such file"):
        make(TrexStf(trex_dir=TREE, trex_cfg=Path("/no/such")))


# -- on another host ------------------------------------------------------------------------------

MACS = (
    {"source_mac": "02:00:00:00:00:01", "destination_mac": "52:54:00:5a:00:01"},
    {"source_mac": "02:00:00:00:00:02", "destination_mac": "52:54:00:12:34:56"},
)
HOST = {"type": "ssh", "host": "generator", "key": "/k", "known_hosts": "/h"}


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The other host is this one, as root, whoever runs the tests."""
    return install(tmp_path, monkeypatch, ssh=SSH, id="#!/bin/sh\necho 0\n")


def test_a_batch_on_another_host(trex: Trex, ssh: Path, tmp_path: Path) -> None:
    configuration = tmp_path / "cfg.yaml"
    configuration.write_text("- interfaces: [0000:03:00.0, 0000:03:00.1]\n  port_info: [{ip: 1.1.1.1}]\n")
    with generator(
        machine=HOST, pps_per_m=1e6, trex_cfg=configuration, macs=MACS, arguments=("-c", "$(touch x)")
    ) as tool:
        judged = judge(CLEAN, tool.run(CLEAN), 0.005)
        [started] = trex.calls()
        written = Path(started["arguments"][7])
        [made] = YAML(typ="safe").load(written.read_text())
    assert judged.verdict is Verdict.PASSED, judged.reason
    assert started["cwd"] == str(TREE) and started["arguments"][8:] == ["-c", "$(touch x)"]
    assert made["interfaces"] == ["0000:03:00.0", "0000:03:00.1"], "which is no number"
    assert made["port_info"] == [
        {"src_mac": one["source_mac"], "dest_mac": one["destination_mac"]} for one in MACS
    ]
    assert not written.exists()
    called = ssh.read_text()
    assert "root@generator" in called and "-i /k" in called and "UserKnownHostsFile=/h" in called
    assert called.count("StrictHostKeyChecking=yes") == called.count("root@generator")


def test_a_late_batch_on_another_host_is_stopped_there(trex: Trex, ssh: Path) -> None:
    """The guard there ends it when the connection's input is closed."""
    trex.play("stf_clean", hangs=True)
    with generator(machine=HOST, pps_per_m=1e6) as tool:
        found = tool.run(TrialRequest(80_000, 10))
    assert found.tx_shortfall > 0
    [started] = trex.calls()
    assert not Path(f"/proc/{started['pid']}").exists()


@pytest.mark.parametrize(
    ("program", "does", "why"),
    [
        ("ssh", "echo Host key verification failed. >&2; exit 255", "--trex-ssh: .*key verification failed"),
        ("id", "echo 1000", "t-rex-64: TRex needs root"),
    ],
)
def test_a_host_that_cannot_be_used(
    trex: Trex, ssh: Path, monkeypatch: pytest.MonkeyPatch, program: str, does: str, why: str
) -> None:
    monkeypatch.setattr("netplugin_zeroloss.generators.trex_stf._CONNECT_S", 0.0)
    (ssh.parent / program).write_text(f"#!/bin/sh\n{does}\n")
    with pytest.raises(UnusableInput, match=why):
        make(TrexStf(trex_dir=TREE, machine=HOST))


def test_a_host_with_an_old_python(trex: Trex, ssh: Path) -> None:
    python = ssh.parent / "python3"
    python.write_text("#!/bin/sh\necho 'ImportError: pidfd_open' >&2; exit 1\n")
    python.chmod(0o755)
    with pytest.raises(UnusableInput, match=r"needs python3 of version 3\.9 or later: .*ImportError"):
        make(TrexStf(trex_dir=TREE, machine=HOST))


@pytest.mark.parametrize("text", ["", "- {}", "a: [", "- interfaces: 3", "- interfaces: []\n- b"])
def test_what_is_no_configuration(text: str) -> None:
    with pytest.raises(UnusableInput, match="--trex-cfg: here is no configuration of TRex"):
        with_macs(text, [PortMacs(**MACS[0])], "here")

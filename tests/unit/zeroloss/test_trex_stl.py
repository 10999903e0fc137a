"""Trials with the stateless client of TRex, played by a stand-in: asked, watched, stopped, judged."""

from __future__ import annotations

import math
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from netplugin_zeroloss.generators import ends_with_owner
from netplugin_zeroloss.generators.choose import TrexStl, make
from netplugin_zeroloss.generators.contract import Generator, Look, elapsed
from netplugin_zeroloss.generators.frames import Frames, Vary
from netplugin_zeroloss.generators.trex_stl import TrexPath
from netplugin_zeroloss.judge import Cause, Verdict, judge
from netplugin_zeroloss.values import GeneratorError, LatencySummary, TrialRequest, UnusableInput

from tests.lab.processes import wait_for
from tests.unit.zeroloss.trex import TREE, Trex

TEMPLATES = Path(__file__).resolve().parents[3] / "tools" / "trex"
#: 190,001 frames in half a second.
ASKED = TrialRequest(380_000, 0.5)


@contextmanager
def generator(**options: Any) -> Iterator[Generator]:
    with make(TrexStl(trex_dir=TREE, **options)) as made:
        yield made


# -- trials --------------------------------------------------------------------------------------


def test_a_clean_trial(trex: Trex) -> None:
    with generator() as tool:
        found = tool.run(ASKED)
        assert (found.tx_packets, found.rx_packets) == (190_001, 190_001)
        assert not found.aborted and found.settled
        assert found.elapsed_s == pytest.approx(0.5, abs=found.elapsed_uncertainty_s + 1e-4)
        assert judge(ASKED, found, 0.005).verdict is Verdict.PASSED
    assert trex.calls("start") == [{"call": "start", "ports": [0], "mult": "380000.0000pps", "duration": 0.5}]
    assert trex.calls()[-1]["call"] == "disconnect"


def test_frames_before_the_trial_are_not_counted(trex: Trex) -> None:
    """Port counters and those that are never cleared begin somewhere."""
    trex.play("stl_clean_38kpps", seconds=0.5, before=10**9)
    with generator() as tool:
        found = tool.run(TrialRequest(380_000, 0.5, abort_on_loss=False))
    assert (found.tx_packets, found.rx_packets) == (190_001, 188_476)
    assert (found.queue_drops, found.queue_full) == (0, 0)


@pytest.mark.parametrize(
    ("recording", "sent", "verdict", "cause"),
    [
        ("stl_dut_drop_45kpps", 225_001, Verdict.LOSSY, None),
        ("stl_own_receiver_drops_50kpps", 306_002, Verdict.INVALID, Cause.RECEIVER),
        ("stl_queue_drop_1mpps", 2_882_088, Verdict.INVALID, Cause.QUEUE),
        ("stl_stretched_8mpps", 40_005_001, Verdict.INVALID, Cause.QUEUE),
    ],
)
def test_real_statistics_are_judged_as_they_deserve(
    trex: Trex, recording: str, sent: int, verdict: Verdict, cause: Cause | None
) -> None:
    trex.play(recording, seconds=0.3)
    asked = TrialRequest(sent / 0.3, 0.3, abort_on_loss=False)
    with generator() as tool:
        found = tool.run(asked)
    judged = judge(asked, found, 0.005)
    assert found.tx_packets == sent
    assert (judged.verdict, judged.cause) == (verdict, cause), judged.reason


def test_a_trial_is_stopped_when_loss_is_certain(trex: Trex) -> None:
    trex.play("stl_clean_38kpps", seconds=60, share_back=0.5)
    asked = TrialRequest(3_166, 60)
    with generator(in_flight=100) as tool:
        found = tool.run(asked)
    assert found.aborted and 200 <= found.tx_packets < 190_001
    assert found.rx_packets == found.tx_packets // 2
    assert judge(asked, found, 0.005).verdict is Verdict.LOSSY
    assert [c["call"] for c in trex.calls() if c["call"] in ("start", "stop")][-3:-1] == [
        "start",
        "stop",
    ]


def test_a_trial_that_may_not_be_stopped_is_not(trex: Trex) -> None:
    trex.play("stl_clean_38kpps", seconds=0.3, share_back=0.5)
    with generator(in_flight=10) as tool:
        found = tool.run(TrialRequest(633_000, 0.3, abort_on_loss=False))
    assert not found.aborted and found.tx_packets == 190_001


def test_a_trial_that_is_late_is_given_up(trex: Trex) -> None:
    trex.play("stl_clean_38kpps", seconds=60, share_back=1)
    with generator() as tool:
        found = tool.run(ASKED)
    assert not found.aborted and found.tx_packets < 190_001
    assert judge(ASKED, found, 0.005).cause in (Cause.SHORT, Cause.LATE)


def test_both_directions(trex: Trex) -> None:
    """The rate is that of both together. The recording has none on the way back."""
    paths = (TrexPath(send=0, receive=1), TrexPath(send=1, receive=0))
    with generator(paths=paths) as tool:
        assert tool.info.line_bps == 20e9
        found = tool.run(ASKED)
    assert [(d.tx_packets, d.rx_packets) for d in found.directions] == [(190_001, 190_001), (0, 0)]
    [start] = trex.calls("start")
    assert (start["ports"], start["mult"]) == ([0, 1], "190000.0000pps")


def test_what_it_says_of_itself(trex: Trex) -> None:
    with generator() as tool:
        assert tool.info.name == "TRex v3.08 stateless (net_fake)"
        assert tool.info.can_abort and math.isinf(tool.info.max_pps)
        assert tool.info.limit_pps(64) == pytest.approx(14_880_952, abs=1)
    with generator(max_pps=1e6) as tool:
        assert tool.info.limit_pps(64) == 1e6
    [about, _] = trex.calls("client")
    assert (about["server"], about["sync_port"], about["async_port"]) == ("127.0.0.1", 4501, 4500)


def looks(*points: tuple[float, int]) -> list[Look]:
    return [Look(at, 0.001, sent) for at, sent in points]


def test_elapsed_time_is_that_of_the_counters() -> None:
    """Before the first look and after the last it went on at the same pace."""
    steady = looks(*((100 + 0.02 * n, min(10_000, 1_000 * n)) for n in range(20)))
    assert elapsed(steady, 10_000) == (pytest.approx(0.2), pytest.approx(0.0025))


def test_elapsed_time_of_a_run_that_was_stretched() -> None:
    slow = looks((0.0, 0), (0.5, 1_000), (1.0, 1_100), (1.5, 1_200), (2.0, 2_000), (2.1, 2_200))
    assert elapsed(slow, 2_200)[0] == pytest.approx(3.3)


def test_the_doubt_covers_a_run_that_was_over_before_it_was_seen() -> None:
    seconds, doubt = elapsed(looks((0.0, 0), (0.02, 0), (0.04, 50)), 50)
    assert seconds - doubt <= 0 and seconds + doubt >= 0.04


# -- what it lies about --------------------------------------------------------------------------


@pytest.mark.parametrize("before", [2**32 - 1000, 2**32 - 189_000])
def test_a_counter_that_wraps_makes_the_trial_invalid(trex: Trex, before: int) -> None:
    """A NIC that counts in 32 bits: early in the trial or late, no loss and no pass; the next one counts."""
    trex.play("stl_clean_38kpps", seconds=0.5, share_back=1, before=before, wraps=32)
    with generator() as tool:
        found = tool.run(ASKED)
    judged = judge(ASKED, found, 0.005)
    assert (judged.verdict, judged.cause) == (Verdict.INVALID, Cause.COUNTERS), judged.reason
    assert "wrapped" in judged.reason


@pytest.mark.parametrize(
    ("asked", "cause"),
    [(TrialRequest(400_000, 0.5), Cause.SHORT), (TrialRequest(360_000, 0.5), Cause.FAST)],
    ids=["less", "more"],
)
def test_what_another_session_sends_or_ours_does_not_is_seen(
    trex: Trex, asked: TrialRequest, cause: Cause
) -> None:
    """Whoever took the ports by force: the counters of the ports have what was not asked."""
    with generator() as tool:
        judged = judge(asked, tool.run(asked), 0.005)
    assert (judged.verdict, judged.cause) == (Verdict.INVALID, cause), judged.reason


def test_traffic_ends_with_the_tool_in_the_middle_of_a_trial(trex: Trex, tmp_path: Path) -> None:
    """Killed: the program for TRex sees it, stops what it sends, and gives its ports back."""
    trex.play("stl_clean_38kpps", seconds=600, share_back=1)
    code = (
        "import sys\n"
        "from netplugin_zeroloss.generators.choose import TrexStl, make\n"
        "from netplugin_zeroloss.values import TrialRequest\n"
        "make(TrexStl(trex_dir=sys.argv[1])).run(TrialRequest(100, 600))"
    )
    tool = subprocess.Popen([sys.executable, "-c", code, str(TREE)])
    try:
        wait_for(lambda: bool(trex.calls("start")), 60, "it sends")
    finally:
        tool.kill()
        tool.wait()
    wait_for(lambda: bool(trex.calls("disconnect")), 10, "its ports are given back")
    assert [call["call"] for call in trex.calls()][-3:] == ["stop", "remove", "disconnect"]


# -- what is sent --------------------------------------------------------------------------------


def streams(trex: Trex, asked: TrialRequest, **options: Any) -> list[dict[str, Any]]:
    with generator(**options) as tool:
        tool.run(asked)
    return trex.calls("stream")


def test_one_size_and_many_flows(trex: Trex) -> None:
    [stream] = streams(trex, ASKED)
    packet, engine = stream["packet"]["pkt"], stream["packet"]["vm"]
    assert stream["ports"] == [0] and packet["size"] == 60, "the NIC adds four bytes"
    assert packet["IP"] == {"src": "198.18.0.1", "dst": "198.19.0.1"}
    assert packet["Ether"] == {}, "TRex puts in those of the port"
    assert engine == [
        {"name": "flow", "min_value": 0xC6120001, "max_value": 0xC6120400, "size": 4, "op": "inc"},
        {"fv_name": "flow", "pkt_offset": "IP.src"},
        {"offset": "IP"},
    ]


def test_addresses_and_ports(trex: Trex) -> None:
    frames = Frames(
        source_mac="02:00:00:00:00:01",
        destination_mac="02:00:00:00:00:02",
        source_ip="10.0.0.1",
        destination_ip="10.1.0.1",
        vary=Vary.SOURCE_PORT,  # type: ignore[arg-type]
    )
    asked = TrialRequest(380_000, 0.5, flows=10)
    [stream] = streams(trex, asked, paths=(TrexPath(send=1, receive=0, frames=frames),))
    packet, engine = stream["packet"]["pkt"], stream["packet"]["vm"]
    assert stream["ports"] == [1]
    assert packet["Ether"] == {"src": "02:00:00:00:00:01", "dst": "02:00:00:00:00:02"}
    assert packet["IP"] == {"src": "10.0.0.1", "dst": "10.1.0.1"}
    assert (engine[0]["min_value"], engine[0]["max_value"], engine[0]["size"]) == (1024, 1033, 2)
    assert engine[1]["pkt_offset"] == "UDP.sport"


def test_one_flow_needs_no_field_engine(trex: Trex) -> None:
    [stream] = streams(trex, TrialRequest(380_000, 0.5, flows=1))
    assert stream["packet"]["vm"] == []


def test_a_mix_has_a_stream_for_each_size(trex: Trex) -> None:
    found = streams(trex, TrialRequest(380_000, 0.5, frame_size=354, mix="imix"))
    shares = {s["packet"]["pkt"]["size"] + 4: s["mode"]["pps"] for s in found}
    assert shares == {64: 28, 570: 16, 1518: 4}


def test_streams_are_loaded_once(trex: Trex) -> None:
    with generator() as tool:
        tool.run(ASKED)
        tool.run(TrialRequest(380_000, 0.5, abort_on_loss=False))
        assert len(trex.calls("stream")) == 1
        tool.run(TrialRequest(380_000, 0.5, frame_size=128))
        assert len(trex.calls("stream")) == 2


def test_latency_streams_have_ids_of_their_own_and_go_again(trex: Trex) -> None:
    """TRex counts by id, so the next trial must not begin with what an earlier one measured."""
    paths = (TrexPath(send=0, receive=1), TrexPath(send=1, receive=0))
    with generator(paths=paths) as tool:
        assert tool.info.latency
        first = tool.run(replace(ASKED, latency=True))
        tool.run(replace(ASKED, latency=True))
        assert tool.run(ASKED).latencies == ()
    # Of two directions the stand-in has samples for one.
    assert first.latencies == (LatencySummary(1000, 30.0, 30.0, 40.0, 111.0),)
    assert [call["ids"] for call in trex.calls("pgid")] == [[1, 2], [3, 4]]
    streams = trex.calls("stream")
    assert [s.get("flow_stats") for s in streams] == [
        *(None, None, {"pg_id": 1}, {"pg_id": 2}),
        *(None, None, {"pg_id": 3}, {"pg_id": 4}),
        *(None, None),
    ]
    measuring = streams[2]
    assert (measuring["ports"], measuring["mode"]) == ([0], {"pps": 1000.0})
    assert measuring["packet"]["vm"] == []


@pytest.mark.parametrize(
    "lost",
    [{"latency": "gone"}, {"refuse": {"get_pgid_stats": "Negative pg_id stat value: -7"}}],
)
def test_a_latency_stream_that_is_lost_costs_its_latency_and_no_trial(
    trex: Trex, lost: dict[str, Any]
) -> None:
    trex.play("stl_clean_38kpps", seconds=0.5, share_back=1, **lost)
    with generator() as tool:
        found = tool.run(replace(ASKED, latency=True))
        tool.run(ASKED)
    assert found.latencies == () and judge(ASKED, found, 0.005).verdict is Verdict.PASSED


def test_what_a_latency_stream_lost_is_a_reading(trex: Trex) -> None:
    """Of its frames none came back, and its maximum is no number."""
    with generator() as tool:
        found = tool.run(replace(ASKED, latency=True))
        assert tool.run(ASKED).readings == {}
    assert found.latencies == () and found.readings == {"generator.latency_lost": 500}


def test_latency_streams_are_not_sent_in_bursts(trex: Trex) -> None:
    with generator() as tool:
        tool.run(replace(ASKED, latency=True, burst=10))
    first, measuring = trex.calls("stream")
    assert first["mode"]["pkts_per_burst"] == 10 and first["mode"]["count"] * 10 == 190_000 - 500
    assert measuring["mode"] == {"pps": 1000.0} and measuring["flow_stats"] == {"pg_id": 1}


def test_a_profile_measures_no_latency(trex: Trex) -> None:
    with generator(profile=TEMPLATES / "stl_imix.py") as tool:
        assert not tool.info.latency


def test_readings_during_a_trial(trex: Trex) -> None:
    with generator() as tool:
        found = tool.run(replace(ASKED, readings=3))
    assert 1 <= len(found.progress) <= 3
    counts = [reading.tx_packets for reading in found.progress]
    assert counts == sorted(counts) and 0 < counts[0] <= found.tx_packets


def test_more_flows_than_fit_are_refused_before_they_are_sent(trex: Trex) -> None:
    with generator() as tool, pytest.raises(GeneratorError, match="do not fit"):
        tool.run(TrialRequest(1e3, 0.1, flows=10**9))
    assert not trex.calls("start")


# -- the templates for users ---------------------------------------------------------------------


def test_the_template_with_flows(trex: Trex) -> None:
    arguments = ("--size", "128", "--flows", "500")
    [stream] = streams(trex, ASKED, profile=TEMPLATES / "stl_udp_flows.py", profile_arguments=arguments)
    packet, engine = stream["packet"]["pkt"], stream["packet"]["vm"]
    assert packet["size"] == 124
    assert engine[0]["max_value"] - engine[0]["min_value"] == 499
    assert engine[1]["pkt_offset"] == "IP.src"


def test_the_template_with_imix(trex: Trex) -> None:
    paths = (TrexPath(send=0, receive=1), TrexPath(send=1, receive=0))
    found = streams(trex, ASKED, profile=TEMPLATES / "stl_imix.py", paths=paths)
    shares = {(s["ports"][0], s["packet"]["pkt"]["size"] + 4): s["mode"]["pps"] for s in found}
    assert shares == {(p, size): n for p in (0, 1) for size, n in ((64, 28), (570, 16), (1518, 4))}
    # What one side sends from the other sends to.
    sources = {s["ports"][0]: s["packet"]["pkt"]["IP"]["src"] for s in found}
    targets = {s["ports"][0]: s["packet"]["pkt"]["IP"]["dst"] for s in found}
    assert sources[0] == targets[1] and sources[1] == targets[0]


# -- what cannot be ------------------------------------------------------------------------------


def test_without_a_tree_of_trex(tmp_path: Path) -> None:
    with pytest.raises(UnusableInput, match=r"--trex-dir: .* is no tree of TRex"):
        make(TrexStl(trex_dir=tmp_path))


def test_without_the_package_of_the_client() -> None:
    with pytest.raises(GeneratorError, match="cannot be imported: No module named 'trex'"):
        make(TrexStl())


@pytest.mark.parametrize(
    ("refuse", "says"),
    [
        (
            {"connect": "no answer from tcp://x:4501"},
            "no answer from tcp://x:4501: does t-rex-64 -i",
        ),
        (
            {"acquire": "\x1b[1mport 0 is owned by 'alice'\x1b[0m"},
            r"says: port 0 is owned by 'alice': .*--trex-force",
        ),
    ],
)
def test_a_server_that_cannot_be_used(trex: Trex, refuse: dict[str, str], says: str) -> None:
    trex.play("stl_clean_38kpps", seconds=1, refuse=refuse)
    with pytest.raises(GeneratorError, match=says):
        make(TrexStl(trex_dir=TREE))
    assert not trex.calls("start")


def test_ports_of_another_session_are_taken_if_requested(trex: Trex) -> None:
    trex.play("stl_clean_38kpps", seconds=1, refuse={"acquire": "port 0 is owned by 'alice'"})
    with generator(force=True):
        assert trex.calls("acquire") == [{"call": "acquire", "ports": [0, 1], "force": True}]


def test_a_port_that_is_not_there(trex: Trex) -> None:
    with pytest.raises(GeneratorError, match="it has no port 4, only 0, 1"):
        make(TrexStl(trex_dir=TREE, paths=(TrexPath(send=0, receive=4),)))


# -- a server of its own -------------------------------------------------------------------------


@pytest.fixture
def rpc_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


@pytest.fixture
def configuration(tmp_path: Path) -> Path:
    file = tmp_path / "trex_cfg.yaml"
    file.write_text("- version: 2\n")
    return file


@pytest.fixture(autouse=True)
def root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_a_server_is_started_and_ended(trex: Trex, rpc_port: int, configuration: Path) -> None:
    trex.play("stl_clean_38kpps", seconds=0.5, share_back=1, rpc_port=rpc_port)
    with generator(trex_cfg=configuration, sync_port=rpc_port) as tool:
        assert tool.run(ASKED).tx_packets == 190_001
        assert listens(rpc_port)
    assert not listens(rpc_port)
    [started] = [call for call in trex.calls() if "arguments" in call]
    assert started["arguments"] == ["-i", "--no-scapy-server", "--cfg", str(configuration)]
    assert started["cwd"] == str(TREE), "it looks for its files where it is"


def test_a_server_ends_with_the_tool_however_that_ends(
    trex: Trex, rpc_port: int, configuration: Path, tmp_path: Path
) -> None:
    trex.play("stl_clean_38kpps", seconds=0.5, rpc_port=rpc_port)
    # The directory that a killed tool leaves is to be the test's.
    code = (
        "import sys, os, tempfile; os.geteuid = lambda: 0\n"
        "mkdtemp = tempfile.mkdtemp\n"
        "tempfile.mkdtemp = lambda prefix, dir: mkdtemp(prefix=prefix, dir=sys.argv[4])\n"
        "from netplugin_zeroloss.generators.trex_program import *\n"
        "server = serving(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))\n"
        "print(flush=True); input()"
    )
    tool = subprocess.Popen(
        [sys.executable, "-c", code, str(TREE), str(configuration), str(rpc_port), str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with tool:
        assert tool.stdout is not None and tool.stdout.readline()
        assert listens(rpc_port)
        tool.kill()
    wait_for(lambda: not listens(rpc_port), 30, "the server ends")


def test_a_server_that_cannot_be_started(trex: Trex, rpc_port: int, configuration: Path) -> None:
    trex.play("stl_clean_38kpps", dies="no hugepages: EAL: Cannot init memory")
    options = {"trex_cfg": configuration, "sync_port": rpc_port}
    with pytest.raises(GeneratorError, match=r"t-rex-64 ended:\nno hugepages: EAL"):
        make(TrexStl(trex_dir=TREE, **options))
    with pytest.raises(UnusableInput, match="--trex-cfg: /no/such"):
        make(TrexStl(trex_dir=TREE, trex_cfg=Path("/no/such")))
    with pytest.raises(UnusableInput, match="a server is started from --trex-dir"):
        make(TrexStl(**options))


def test_a_port_that_is_taken(trex: Trex, configuration: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(GeneratorError, match=f"port {port} is taken: does another TRex run"):
            make(TrexStl(trex_dir=TREE, trex_cfg=configuration, sync_port=port))
    assert not trex.calls(), "nothing was started"


def test_root_is_needed(
    trex: Trex, rpc_port: int, configuration: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(UnusableInput, match="TRex needs root"):
        make(TrexStl(trex_dir=TREE, trex_cfg=configuration, sync_port=rpc_port))


def test_a_program_is_interrupted_though_the_tool_was_started_in_the_background() -> None:
    """Shells ignore SIGINT for such a tool, and so would all that it starts."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    sleeping = ["sh", "-c", "echo; exec sleep 60"]
    try:
        wrapper = subprocess.Popen(
            [sys.executable, "-P", ends_with_owner.__file__, "0", "2", "20", *sleeping],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
    finally:
        signal.signal(signal.SIGINT, before)
    with wrapper:
        assert wrapper.stdin is not None and wrapper.stdout is not None
        wrapper.stdout.readline()
        wrapper.stdin.close()
    assert wrapper.returncode == 128 + signal.SIGINT, "not killed after 20 s"

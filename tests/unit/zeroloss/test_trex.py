"""Output and statistics of real runs of TRex 3.08 (tests/data/trex-3.08), judged as they deserve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from netplugin_zeroloss.generators.trex_stf import StfRun, parse_stf
from netplugin_zeroloss.generators.trex_stl import StlReading, measurement
from netplugin_zeroloss.judge import Cause, Judgement, Verdict, judge
from netplugin_zeroloss.values import Direction, GeneratorError, Measurement, TrialRequest

DATA = Path(__file__).resolve().parents[2] / "data" / "trex-3.08"
PRECISION = 0.005


# -- stateful batch ------------------------------------------------------------------------------

#: File, rate that -m requested, seconds of -d.
STF = {
    "stf_clean": (20e3, 20),
    "stf_dut_drop": (60e3, 20),
    "stf_queue_drop": (2e6, 10),
    "stf_stretched_tail": (400e3, 20),
}


def stf(name: str) -> StfRun:
    return parse_stf((DATA / f"{name}.txt").read_text())


def judged(name: str) -> Judgement:
    return judge(TrialRequest(*STF[name]), stf(name).measurement(), PRECISION)


def test_stf_clean() -> None:
    run = stf("stf_clean")
    assert (run.sent, run.received, run.software_errors, run.queue_drops) == (400050, 400050, 0, 0)
    assert run.opackets == (400050, 0) and run.ipackets == (0, 400050)
    assert run.ierrors == run.oerrors == (0, 0)
    assert run.measurement().directions == (Direction(400050, 400050),)
    # The clock said 21.2 s at the end; the traffic took 20 of them.
    assert run.elapsed[0] == pytest.approx(20, abs=0.1)
    assert judged("stf_clean").verdict is Verdict.PASSED


def test_stf_device_drops() -> None:
    run = stf("stf_dut_drop")
    assert (run.sent, run.received) == (1200049, 811460)
    assert run.elapsed[0] == pytest.approx(20, abs=run.elapsed[1])
    found = judged("stf_dut_drop")
    assert found.verdict is Verdict.LOSSY and found.lost_packets == 388589


def test_stf_queue_drops_are_no_loss_of_the_device() -> None:
    """Total-pkt-drop is 0, and so is the exit status: 3.1 M of 20 M frames were sent."""
    run = stf("stf_queue_drop")
    assert run.sent == run.received == 3131346
    assert run.queue_drops == run.software_errors == 16868704
    found = judged("stf_queue_drop")
    assert (found.verdict, found.cause) == (Verdict.INVALID, Cause.QUEUE)


def test_stf_stretched() -> None:
    """Nothing was lost, at a fifth of the rate. The first 80 s of the output are not there."""
    run = stf("stf_stretched_tail")
    assert run.sent == run.received == 8000051
    assert run.elapsed[0] == pytest.approx(93.7, abs=run.elapsed[1])
    found = judged("stf_stretched_tail")
    assert (found.verdict, found.cause) == (Verdict.INVALID, Cause.LATE)
    assert "not 400000" in found.reason


def test_stf_own_receiver() -> None:
    """As the tables say it: made from the clean run, for there is no such recording."""
    text = (DATA / "stf_clean.txt").read_text()
    table = "    ierrors |               0 |               0 "
    assert table in text
    run = parse_stf(text.replace(table, "    ierrors |               0 |              37 "))
    found = judge(TrialRequest(20e3, 20), run.measurement(), PRECISION)
    assert (found.verdict, found.cause) == (Verdict.INVALID, Cause.RECEIVER)


def test_stf_full_queue() -> None:
    text = (DATA / "stf_queue_drop.txt").read_text()
    text = text.replace("Total_queue_drop", "Total_queue_full").replace(
        "Total-sw-err         : 16868704", "Total-sw-err         : 0"
    )
    found = judge(TrialRequest(2e6, 10), parse_stf(text).measurement(), PRECISION)
    assert (found.verdict, found.cause) == (Verdict.INVALID, Cause.QUEUE)


def test_stf_that_did_not_end() -> None:
    text = (DATA / "stf_clean.txt").read_text()
    with pytest.raises(GeneratorError, match="no summary"):
        parse_stf(text[: text.index("summary stats")])
    with pytest.raises(GeneratorError, match="no summary"):
        parse_stf("")
    with pytest.raises(GeneratorError, match="Total-rx-pkt"):
        parse_stf(text.replace("Total-rx-pkt", "Total-xx-pkt"))
    with pytest.raises(GeneratorError, match="while it ran"):
        parse_stf(text[text.index("shutting down") :])


# -- stateless client ----------------------------------------------------------------------------

#: File, rate asked, seconds asked.
STL = {
    "stl_clean_38kpps": (38e3, 5),
    "stl_dut_drop_45kpps": (45e3, 5),
    # 50 kpps, and a latency stream of 1,000 next to it.
    "stl_own_receiver_drops_50kpps": (51e3, 6),
    "stl_queue_drop_1mpps": (1e6, 5),
    # 8 Mpps and a latency stream of 1,000.
    "stl_stretched_8mpps": (8.001e6, 5),
}


def record(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text())
    return content


def counted(content: dict[str, Any]) -> Measurement:
    """As these were recorded: port counters cleared before, looked at each second while it ran."""
    after = StlReading.parse(content["stats"], content["raw_global"])
    # The global ones are never cleared. What they were before was not recorded.
    unknown = after.queue_drops - max(0, after.queue_drops - 2_000_000)
    before = StlReading(
        {0: 0, 1: 0},
        {0: 0, 1: 0},
        {0: 0, 1: 0},
        {0: 0, 1: 0},
        unknown,
        after.queue_full - content["stats"]["global"]["queue_full"],
    )
    polls = [poll[0] for poll in content["mids"]]
    waited = content["wait_s"]
    doubt = polls[-1] - polls[-2] if waited < 0.5 else 0.1
    return measurement(before, after, [(0, 1)], polls[-1] + waited, doubt)


@pytest.mark.parametrize(
    ("name", "verdict", "cause"),
    [
        ("stl_own_receiver_drops_50kpps", Verdict.INVALID, Cause.RECEIVER),
        ("stl_queue_drop_1mpps", Verdict.INVALID, Cause.QUEUE),
        ("stl_stretched_8mpps", Verdict.INVALID, Cause.QUEUE),
        ("stl_dut_drop_45kpps", Verdict.LOSSY, None),
    ],
)
def test_stl(name: str, verdict: Verdict, cause: Cause | None) -> None:
    found = judge(TrialRequest(*STL[name]), counted(record(name)), PRECISION)
    assert (found.verdict, found.cause) == (verdict, cause), found.reason


def test_stl_counts() -> None:
    run = counted(record("stl_dut_drop_45kpps"))
    assert (run.tx_packets, run.rx_packets) == (225001, 197769)
    run = counted(record("stl_own_receiver_drops_50kpps"))
    assert run.tx_packets == run.rx_packets + run.rx_errors == 306002


def test_stl_38kpps_is_what_the_device_lost() -> None:
    """The recording that is called clean is so on the generator's side: 1,525 frames are missing."""
    run = counted(record("stl_clean_38kpps"))
    assert (run.rx_errors, run.queue_drops, run.queue_full) == (0, 0, 0)
    found = judge(TrialRequest(38e3, 5), run, PRECISION)
    assert found.verdict is Verdict.LOSSY and found.lost_packets == 1525


def test_stl_clean() -> None:
    """The same counters, when all of it has come back."""
    content = record("stl_clean_38kpps")
    content["stats"]["1"]["ipackets"] = content["stats"]["0"]["opackets"]
    assert judge(TrialRequest(38e3, 5), counted(content), PRECISION).verdict is Verdict.PASSED


def test_stl_stretched_is_late_even_if_no_counter_tells() -> None:
    content = record("stl_stretched_8mpps")
    content["stats"]["global"]["queue_full"] = 0
    run = counted(content)
    assert run.tx_packets == run.rx_packets == 40005001
    found = judge(TrialRequest(8.001e6, 5), run, PRECISION)
    assert (found.verdict, found.cause) == (Verdict.INVALID, Cause.LATE), found.reason


def test_stl_queue_drop_is_short_even_if_no_counter_tells() -> None:
    content = record("stl_queue_drop_1mpps")
    content["raw_global"]["m_total_queue_drop"] = 0
    found = judge(TrialRequest(1e6, 5), counted(content), PRECISION)
    assert (found.verdict, found.cause) == (Verdict.INVALID, Cause.SHORT)


def test_stl_takes_the_difference_of_what_is_never_cleared() -> None:
    content = record("stl_queue_drop_1mpps")
    after = StlReading.parse(content["stats"], content["raw_global"])
    assert measurement(after, after, [(0, 1)], 5.0).queue_drops == 0
    assert measurement(None, after, [(0, 1)], 5.0).queue_drops == 2979946


def test_stl_after_json_and_in_python() -> None:
    """Port numbers are strings in one and integers in the other; "total" and the like are no ports."""
    content = record("stl_clean_38kpps")
    stats = {int(k) if k.isdecimal() else k: v for k, v in content["stats"].items()}
    assert StlReading.parse(stats, content["raw_global"]) == StlReading.parse(
        content["stats"], content["raw_global"]
    )
    with pytest.raises(GeneratorError, match="no port 7"):
        measurement(None, StlReading.parse(stats, content["raw_global"]), [(0, 7)], 5.0)


@pytest.mark.parametrize(
    ("stats", "raw"),
    [({}, {}), ({"0": {}}, {}), ({"0": {"opackets": "x"}}, {}), ({"total": {}}, {})],
)
def test_stl_that_cannot_be_read(stats: dict[str, Any], raw: dict[str, Any]) -> None:
    with pytest.raises(GeneratorError):
        StlReading.parse(stats, raw)

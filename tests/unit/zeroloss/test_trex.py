"""Output and statistics of real runs of TRex 3.08 (tests/data/trex-3.08), judged as they deserve."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from netplugin_zeroloss.generators.trex_stf import parse_stf
from netplugin_zeroloss.generators.trex_stl import TrexPath
from netplugin_zeroloss.generators.trex_stl_trials import Counters
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


def stf(name: str) -> Measurement:
    return parse_stf((DATA / f"{name}.txt").read_text())


def judged(name: str) -> Judgement:
    return judge(TrialRequest(*STF[name]), stf(name), PRECISION)


def test_stf_clean() -> None:
    run = stf("stf_clean")
    assert (run.tx_packets, run.rx_packets, run.rx_errors, run.queue_drops) == (400050, 400050, 0, 0)
    assert run.directions == (Direction(400050, 400050),), "port 0 sent all, and port 1 received it"
    # The clock said 21.2 s at the end; the traffic took 20 of them.
    assert run.elapsed_s == pytest.approx(20, abs=0.1)
    assert judged("stf_clean").verdict is Verdict.PASSED


def test_stf_device_drops() -> None:
    run = stf("stf_dut_drop")
    assert (run.tx_packets, run.rx_packets) == (1200049, 811460)
    assert run.elapsed_s == pytest.approx(20, abs=run.elapsed_uncertainty_s)
    found = judged("stf_dut_drop")
    assert found.verdict is Verdict.LOSSY and found.lost_packets == 388589


def test_stf_queue_drops_are_no_loss_of_the_device() -> None:
    """Total-pkt-drop is 0, and so is the exit status: 3.1 M of 20 M frames were sent."""
    run = stf("stf_queue_drop")
    assert run.tx_packets == run.rx_packets == 3131346
    assert run.queue_drops == 16868704
    found = judged("stf_queue_drop")
    assert (found.verdict, found.cause) == (Verdict.INVALID, Cause.QUEUE)


def test_stf_stretched() -> None:
    """Nothing was lost, at a fifth of the rate. The first 80 s of the output are not there."""
    run = stf("stf_stretched_tail")
    assert run.tx_packets == run.rx_packets == 8000051
    assert run.elapsed_s == pytest.approx(93.7, abs=run.elapsed_uncertainty_s)
    found = judged("stf_stretched_tail")
    assert (found.verdict, found.cause) == (Verdict.INVALID, Cause.LATE)
    assert "not 400000" in found.reason


def test_stf_own_receiver() -> None:
    """As the tables say it: made from the clean run, for there is no such recording."""
    text = (DATA / "stf_clean.txt").read_text()
    table = "    ierrors |               0 |               0 "
    assert table in text
    run = parse_stf(text.replace(table, "    ierrors |               0 |              37 "))
    found = judge(TrialRequest(20e3, 20), run, PRECISION)
    assert (found.verdict, found.cause) == (Verdict.INVALID, Cause.RECEIVER)


def test_stf_full_queue() -> None:
    text = (DATA / "stf_queue_drop.txt").read_text()
    text = text.replace("Total_queue_drop", "Total_queue_full").replace(
        "Total-sw-err         : 16868704", "Total-sw-err         : 0"
    )
    found = judge(TrialRequest(2e6, 10), parse_stf(text), PRECISION)
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


PATHS = (TrexPath(send=0, receive=1),)


def reading(content: dict[str, Any]) -> Counters:
    """Port numbers are integers in Python, and strings in the recordings."""
    stats = {int(k) if k.isdecimal() else k: v for k, v in content["stats"].items()}
    return Counters.parse(stats, content["raw_global"], (0, 1))


def nothing(queue_drops: int = 0, queue_full: int = 0) -> Counters:
    names = ("opackets", "ipackets", "ierrors", "oerrors")
    of_all = {(None, "queue_drop"): queue_drops, (None, "queue_full"): queue_full}
    return Counters({(port, name): 0 for port in (0, 1) for name in names} | of_all)


def counted(content: dict[str, Any]) -> Measurement:
    """As these were recorded: port counters cleared before, looked at each second while it ran."""
    after = reading(content)
    # The global ones are never cleared. What they were before was not recorded.
    drops, full = after[None, "queue_drop"], after[None, "queue_full"]
    before = nothing(drops - max(0, drops - 2_000_000), full - content["stats"]["global"]["queue_full"])
    polls = [poll[0] for poll in content["mids"]]
    waited = content["wait_s"]
    doubt = polls[-1] - polls[-2] if waited < 0.5 else 0.1
    return after.since(before).measurement(PATHS, polls[-1] + waited, elapsed_uncertainty_s=doubt)


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
    after = reading(content)
    assert after.since(after).measurement(PATHS, 5.0).queue_drops == 0
    assert after.measurement(PATHS, 5.0).queue_drops == 2979946


def test_stl_that_cannot_be_read() -> None:
    content = record("stl_clean_38kpps")
    with pytest.raises(KeyError, match="0"):
        Counters.parse(content["stats"], content["raw_global"], (0, 1))
    with pytest.raises(KeyError, match="m_total_queue_drop"):
        Counters.parse(content["stats"], {}, ["0"])  # type: ignore[list-item]
    content["stats"]["0"]["opackets"] = "x"
    with pytest.raises(ValueError, match="'x'"):
        reading(content)


# -- a counter that wraps ------------------------------------------------------------------------


@pytest.mark.parametrize("counter", ["opackets", "ipackets", "ierrors", "oerrors"])
@pytest.mark.parametrize("port", [0, 1])
def test_a_counter_that_wraps_is_no_loss_and_no_pass(counter: str, port: int) -> None:
    """A counter of 32 bits near its end: the trial says nothing of the device, whichever counter it is."""
    content = record("stl_clean_38kpps")
    content["stats"]["1"]["ipackets"] = content["stats"]["0"]["opackets"]
    near, after = 2**32 - 1000, reading(content)
    before = Counters({key: n if key[0] is None else near for key, n in after.items()})
    now = Counters({key: n if key[0] is None else near + n for key, n in after.items()})
    now[port, counter] %= 2**32
    paths = (TrexPath(send=0, receive=1), TrexPath(send=1, receive=0))
    measured = now.since(before).measurement(paths, 5.0)
    found = judge(TrialRequest(38e3, 5), measured, PRECISION)
    wraps = after[port, counter] >= 1000
    assert (found.verdict, found.cause) == (
        (Verdict.INVALID, Cause.COUNTERS) if wraps else (Verdict.PASSED, None)
    ), found.reason


@pytest.mark.parametrize("name", ["Total-rx-pkt", "Total-tx-pkt"])
def test_a_batch_that_prints_a_wrapped_counter_is_invalid(name: str) -> None:
    text = (DATA / "stf_clean.txt").read_text()
    wrapped = re.sub(rf"({name} *: )400050", rf"\g<1>{400050 - 2**32}", text)
    assert wrapped != text
    found = judge(TrialRequest(20e3, 20), parse_stf(wrapped), PRECISION)
    assert (found.verdict, found.cause) == (Verdict.INVALID, Cause.COUNTERS)

"""The protocol of ``exec`` with small programs: good, silent, dying, lying and slow ones."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from netplugin_zeroloss.generators.exec import ExecGenerator
from netplugin_zeroloss.judge import Cause, judge
from netplugin_zeroloss.search.search import run_search
from netplugin_zeroloss.search.trials import SearchPlan, SearchVerdict
from netplugin_zeroloss.values import (
    Direction,
    GeneratorError,
    LatencySummary,
    Measurement,
    Progress,
    TrialRequest,
    UnusableInput,
    headline,
)

from tests.unit.zeroloss.helpers import asked

#: Answers each line with what ``answer(question)`` returns; None is silence.
PROGRAM = """
import json, sys, time, os
def say(text):
    sys.stdout.write(text); sys.stdout.flush()
{body}
for line in sys.stdin:
    question = json.loads(line)
    with open({log!r}, "a") as log:
        log.write(line)
    if question["op"] == "bye":
        break
    reply = answer(question)
    if reply is not None:
        say(reply if isinstance(reply, str) else json.dumps(reply) + "\\n")
"""

HELLO = '{"ok": True, "name": "small", "virtual_time": True}'
GOOD = f"""
def answer(q):
    if q["op"] == "hello":
        return {HELLO}
    n = int(q["rate_pps"] * q["duration_s"])
    return {{"tx_packets": n, "rx_packets": n, "elapsed_s": q["duration_s"]}}
"""
#: A device that forwards 3.3 Mpps, and a generator that stops on loss.
DEVICE = f"""
def answer(q):
    if q["op"] == "hello":
        return {HELLO}
    rate, t = q["rate_pps"], q["duration_s"]
    lost = max(0, rate - 3.3e6)
    aborted = bool(lost and q["abort_on_loss"])
    if aborted:
        t = min(t, 2000 / lost)
    n = int(rate * t)
    return {{"tx_packets": n, "rx_packets": n - int(lost * t), "elapsed_s": t, "aborted": aborted,
            "tx_shortfall": 0, "rx_errors": 0, "evidence": {{"ring": int(lost * t)}}}}
"""


class Program:
    """A program of the test, and the lines that it was sent."""

    def __init__(self, folder: Path, body: str) -> None:
        self.log = folder / "log"
        path = folder / "program.py"
        path.write_text(PROGRAM.format(body=body, log=str(self.log)))
        self.command = shlex.join([sys.executable, str(path)])

    def questions(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]


MEASURING = """
def answer(q):
    if q["op"] == "hello":
        return {"ok": True, "virtual_time": True, "latency": True}
    n = int(q["rate_pps"] * q["duration_s"])
    reply = {"tx_packets": n, "rx_packets": n, "elapsed_s": q["duration_s"]}
    if q.get("latency"):
        reply["latencies"] = [{"samples": 10, "p50_us": 1, "p90_us": 2, "p99_us": 3, "max_us": 4.5}]
    for number in range(q.get("readings", 0)):
        reply.setdefault("progress", []).append({"elapsed_s": number, "tx_packets": 2, "rx_packets": 1})
    return reply
"""


def test_latency_and_readings_are_answered_when_they_are_requested(tmp_path: Path) -> None:
    program = Program(tmp_path, MEASURING)
    with ExecGenerator(program.command, 10) as generator:
        assert generator.info.latency
        plain = generator.run(asked(1e6, 1.0))
        measured = generator.run(asked(1e6, 1.0, latency=True, readings=2))
    assert (plain.latencies, plain.progress) == ((), ())
    assert measured.latencies == (LatencySummary(10, 1, 2, 3, 4.5),)
    assert measured.progress == (Progress(0, 2, 1), Progress(1, 2, 1))
    first, second = program.questions()[1:3]
    assert "latency" not in first and "readings" not in first
    assert (second["latency"], second["readings"]) == (True, 2)


def test_a_latency_that_cannot_be_is_named(tmp_path: Path) -> None:
    program = Program(tmp_path, MEASURING.replace('"p90_us": 2', '"p90_us": -2'))
    with (
        ExecGenerator(program.command, 10) as generator,
        pytest.raises(GeneratorError, match=r"latencies\.0\.p90_us"),
    ):
        generator.run(asked(1e6, 1.0, latency=True))


def test_it_is_asked_as_the_protocol_says(tmp_path: Path) -> None:
    program = Program(tmp_path, GOOD)
    with ExecGenerator(program.command, 10) as generator:
        assert (generator.info.name, generator.info.virtual_time) == ("small", True)
        measured = generator.run(asked(1e6, 60.0))
        generator.run(TrialRequest(2e6, 1.0, 128, 7, abort_on_loss=False))
        generator.run(TrialRequest(2e6, 1.0, 354, 7, abort_on_loss=False, mix="imix"))
    assert measured == Measurement(60_000_000, 60_000_000, 60.0)
    assert program.questions() == [
        {"op": "hello", "version": 1},
        {
            "op": "trial",
            "rate_pps": 1e6,
            "duration_s": 60.0,
            "frame_size": 64,
            "flows": 1024,
            "abort_on_loss": True,
        },
        {
            "op": "trial",
            "rate_pps": 2e6,
            "duration_s": 1.0,
            "frame_size": 128,
            "flows": 7,
            "abort_on_loss": False,
        },
        {
            "op": "trial",
            "rate_pps": 2e6,
            "duration_s": 1.0,
            "frame_size": 354,
            "flows": 7,
            "abort_on_loss": False,
            "mix": "imix",
        },
        {"op": "bye"},
    ]


def test_all_messages_that_it_may_send_are_received(tmp_path: Path) -> None:
    body = """
def answer(q):
    if q["op"] == "hello":
        return {"ok": True, "name": "all", "max_pps": 5e6, "can_abort": False, "min_trial_s": 2,
                "more": 1}
    return {"tx_packets": 60.0, "rx_packets": 50, "elapsed_s": 3, "aborted": True,
            "tx_shortfall": 1, "rx_errors": 2, "queue_drops": 3, "queue_full": 4,
            "in_flight_packets": 5, "elapsed_uncertainty_s": 0.5, "settled": False,
            "directions": [{"tx_packets": 30, "rx_packets": 20}, {"tx_packets": 30, "rx_packets": 30}],
            "evidence": {"nic": 7}, "unknown": "x"}
"""
    with ExecGenerator(Program(tmp_path, body).command, 10) as generator:
        info = generator.info
        assert (info.max_pps, info.virtual_time, info.can_abort, info.min_trial_s) == (
            5e6,
            False,
            False,
            2,
        )
        assert generator.run(asked()) == Measurement(
            60,
            50,
            3.0,
            True,
            1,
            2,
            3,
            4,
            5,
            0.5,
            False,
            (Direction(30, 20), Direction(30, 30)),
            {"nic": 7.0},
        )


def test_a_search_through_it(tmp_path: Path) -> None:
    with ExecGenerator(Program(tmp_path, DEVICE).command, 10) as generator:
        found = run_search(SearchPlan((headline(),), 14.88e6), generator).found
    assert found.headline.verdict is SearchVerdict.NDR
    assert found.headline.lower_pps <= 3.3e6 <= found.headline.upper_pps
    assert len(found.trials) <= 6


def test_the_false_output_of_a_program_is_refused(tmp_path: Path) -> None:
    """More received than sent, and wrapped: invalid trials, no error."""
    body = f"""
def answer(q):
    if q["op"] == "hello":
        return {HELLO}
    n = int(q["rate_pps"] * q["duration_s"])
    return {{"tx_packets": n, "rx_packets": n + 5 if n % 2 else -n, "elapsed_s": q["duration_s"]}}
"""
    with ExecGenerator(Program(tmp_path, body).command, 10) as generator:
        found = judge(asked(), generator.run(asked()), 0.005)
        assert found.cause is Cause.COUNTERS
        outcome = run_search(SearchPlan((headline(),), 14.88e6), generator).found.headline
    assert outcome.verdict is SearchVerdict.GENERATOR_LIMITED and outcome.answer_pps is None


HOPELESS = {
    "silent": ("def answer(q): return None", "no answer within"),
    "silent in a trial": (
        f"def answer(q): return {HELLO} if q['op'] == 'hello' else None",
        "no answer within",
    ),
    "dying": ("def answer(q): print('no port', file=sys.stderr); sys.exit(3)", "status 3.*\n.*\nno port"),
    "dying in a trial": (
        f"def answer(q): return {HELLO} if q['op'] == 'hello' else sys.exit(4)",
        "status 4",
    ),
    "killed": ("def answer(q): os.kill(os.getpid(), 9)", "status 137"),
    "closing its output": (
        "def answer(q): os.close(1); time.sleep(3600)",
        "closed its standard output",
    ),
    "no JSON": ("def answer(q): return 'hello yourself\\n'", "no JSON"),
    "half a line": ("def answer(q): return '{\"ok\": true'", "no answer within"),
    "no object": ("def answer(q): return [1]", "an object with named fields"),
    "unwilling": ("def answer(q): return {'ok': False}", "ok: false"),
    "with words": ("def answer(q): return {'ok': False, 'error': 'the port is taken'}", "the port is taken"),
    "nothing in it": (f"def answer(q): return {HELLO} if q['op'] == 'hello' else {{}}", "tx_packets"),
    "words for numbers": (
        f"def answer(q): return {HELLO} if q['op'] == 'hello' else "
        "{'tx_packets': 'many', 'rx_packets': 1, 'elapsed_s': 1}",
        "tx_packets",
    ),
    "not a number": (
        f"def answer(q): return {HELLO} if q['op'] == 'hello' else "
        "{'tx_packets': 1, 'rx_packets': 1, 'elapsed_s': float('nan')}",
        "elapsed_s",
    ),
    "nested deeply": ("def answer(q): return '[' * 300_000 + '\\n'", "nested too deeply"),
    "a number without bounds": (
        f"def answer(q): return {HELLO} if q['op'] == 'hello' else "
        "{'tx_packets': 10**400, 'rx_packets': 10**400, 'elapsed_s': 1}",
        "tx_packets: a number of more than 64 bits",
    ),
    "a float without bounds": (
        f"def answer(q): return {HELLO} if q['op'] == 'hello' else "
        "{'tx_packets': 1, 'rx_packets': 1, 'elapsed_s': 1, 'evidence': {'nic': 1e300}}",
        r"evidence\.nic",
    ),
    "two answers at once": (
        f"def answer(q): return {HELLO} if q['op'] == 'hello' else "
        """'{"tx_packets": 1, "rx_packets": 1, "elapsed_s": 0}\\n' * 2""",
        "answered before it was asked",
    ),
    "dripping": ("def answer(q):\n    while True: say('x'); time.sleep(0.01)", "no answer within"),
    "loud on its standard error": (
        "def answer(q):\n    while True: sys.stderr.write('no link\\n')",
        "no answer within.*\n.*\n.*no link",
    ),
    "endless": ("def answer(q):\n    while True: say('x' * 65536)", "longer than a line"),
    "a negative limit": ("def answer(q): return {'ok': True, 'max_pps': -1}", "max_pps"),
}


@pytest.mark.parametrize("name", sorted(HOPELESS))
def test_a_program_that_is_no_use_is_an_error_in_time(tmp_path: Path, name: str) -> None:
    body, message = HOPELESS[name]
    # Within that it has to start and to say what it says.
    seconds = 3.0 if message.startswith("no answer within") else 60.0
    with pytest.raises(GeneratorError, match=message):
        with ExecGenerator(Program(tmp_path, body).command, seconds) as generator:
            generator.run(asked(1e6, 0.1))
            generator.run(asked(1e6, 0.1))


def test_a_slow_program_has_the_time_of_its_trial(tmp_path: Path) -> None:
    body = """
def answer(q):
    if q["op"] == "hello":
        return {"ok": True}
    time.sleep(q["duration_s"])
    return {"tx_packets": 1, "rx_packets": 1, "elapsed_s": q["duration_s"]}
"""
    with ExecGenerator(Program(tmp_path, body).command, 5.0) as generator:
        assert generator.run(asked(1, 6)).elapsed_s == 6


def test_it_is_gone_after_close_with_what_it_started(tmp_path: Path) -> None:
    """Even if it does not want to: the child would sleep for long."""
    body = f"""
import subprocess, signal
child = subprocess.Popen(["sleep", "600"])
open({str(tmp_path / "child")!r}, "w").write(str(child.pid))
signal.signal(signal.SIGTERM, signal.SIG_IGN)
def answer(q): return {HELLO}
"""
    generator = ExecGenerator(Program(tmp_path, body).command, 60)
    generator.close()
    generator.close()
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 60
    while is_running(child):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_it_ends_with_the_tool_though_that_was_killed(tmp_path: Path) -> None:
    """With what it started; neither reads its input, and both write to standard error without end."""
    body = f"""
import subprocess
loud = "import os\\nwhile True: os.write(2, b'x' * 65536)"
def answer(q):
    child = subprocess.Popen([sys.executable, "-c", loud])
    open({str(tmp_path / "pids")!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
    say('{{"ok": true}}\\n')
    exec(loud)
"""
    code = (
        "import os, sys; from netplugin_zeroloss.generators.exec import ExecGenerator;"
        " ExecGenerator(sys.argv[1]); os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", code, Program(tmp_path, body).command], timeout=60)
    assert killed.returncode == -9
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    deadline = time.monotonic() + 60
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_there_is_no_shell(tmp_path: Path) -> None:
    target = tmp_path / "made"
    with pytest.raises((GeneratorError, UnusableInput)):
        ExecGenerator(f"true; touch {target}", 1.0)
    with pytest.raises(GeneratorError):
        ExecGenerator(f"echo $(touch {target})", 1.0)
    assert not target.exists()


@pytest.mark.parametrize("command", ["", "  ", "'open", "/no/such/program", "/etc/passwd"])
def test_a_command_that_cannot_be_started_names_the_option(command: str) -> None:
    with pytest.raises(UnusableInput, match="--exec-cmd"):
        ExecGenerator(command, 1.0)

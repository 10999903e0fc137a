"""The command: what it refuses, what it prints, the JSON that others read, and how it exits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from netplugin_zeroloss.cli.main import main
from netplugin_zeroloss.evaluation import algorithms
from netplugin_zeroloss.values import UnusableInput

from tests.unit.zeroloss.test_exec import DEVICE, GOOD, HELLO, Program

ROOT = Path(__file__).resolve().parents[3]
SIM = ("search", "--generator", "sim")


def run_json(tmp_path: Path, *arguments: str, status: int = 0) -> dict[str, Any]:
    file = tmp_path / "result.json"
    assert main([*SIM, "--quiet", "--json", str(file), *arguments]) == status
    result: dict[str, Any] = json.loads(file.read_text(), parse_constant=pytest.fail)
    return result


def test_the_result_has_all_that_is_promised(tmp_path: Path) -> None:
    result = run_json(tmp_path, "--line-rate-pps", "14880000", "--seed", "3")
    assert result["verdict"] == "ndr"
    lower, upper = result["bounds_pps"]
    assert lower == result["zero_loss_pps"] and lower <= 4.2e6 <= upper <= lower * 1.005 + 0.02
    assert (result["trials"], result["invalid_trials"]) == (4, 0)
    assert result["traffic_s"] == pytest.approx(60.6, abs=0.3)
    assert result["wall_s"] < 60
    assert result["goal"]["max_loss_ratio"] == 0 and result["goal"]["final_trial_s"] == 60
    assert "no frame lost" in result["goal"]["in_words"]
    assert len(result["trial_log"]) == 4
    first = result["trial_log"][0]
    assert first["verdict"] == "lossy" and first["reason"] and first["measured"]["tx_packets"]
    assert result["evidence"]["lower_trials"] == [3]
    assert result["evidence"]["places_at_upper"].keys() == {"rx_ring_full"}
    assert result["environment"]["generator"] == "sim:clean" and result["environment"]["seed"] == 3


@pytest.mark.parametrize("arguments", [("--help",), SIM, ("report", "run")])
def test_without_its_requirements_the_script_says_how_to_install_them(arguments: tuple[str, ...]) -> None:
    found = subprocess.run(
        [sys.executable, "-I", "-S", ROOT / "tools/trex/zeroloss.py", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr == (
        "netplugin-zeroloss: the Python package pydantic is missing: in a checkout, and in its virtualenv,"
        " pip install . ./tools/trex\n"
    )


@pytest.mark.parametrize(
    ("device", "verdict", "number"),
    [
        ("clean", "ndr", True),
        ("noisy", "ndr", True),
        ("glitch", "floor", False),
        ("short-generator", "generator_limited", False),
        ("wire-speed", "ndr", True),
    ],
)
def test_verdicts_with_and_without_a_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], device: str, verdict: str, number: bool
) -> None:
    result = run_json(tmp_path, "--sim-device", device)
    assert result["verdict"] == verdict
    assert (result["zero_loss_pps"] is not None) == number
    printed = capsys.readouterr().out
    assert printed.startswith(f"verdict    {verdict}: ")
    # The goal stands next to the number, or next to the word that there is none.
    [line] = [line for line in printed.splitlines() if line.startswith("zero-loss ")]
    assert "no frame lost, 1 x 60 s, bounds within 0.500%" in line
    assert ("pps  (" in line) == number and ("no rate" in line) == (not number)


def test_a_floor_says_how_much_and_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    floor = run_json(tmp_path, "--sim-device", "glitch")["evidence"]["floor"]
    assert floor["place"] == "link" and 0 < floor["loss_ratio"] < 1e-5
    assert "of the frames, at link" in capsys.readouterr().out


def test_a_search_that_fails(tmp_path: Path) -> None:
    result = run_json(tmp_path, "--sim-device", "noisy", "--max-trials", "5", status=1)
    assert result["verdict"] == "failed" and result["zero_loss_pps"] is None
    assert "5 trials" in result["reason"]


def test_other_goals_next_to_the_headline(tmp_path: Path) -> None:
    result = run_json(tmp_path, "--goal", "csit-ndr", "--goal", "csit-pdr")
    names = [goal["goal"]["name"] for goal in result["goals"]]
    assert names == ["zero-loss", "csit-ndr", "csit-pdr"]
    assert all(goal["rate_pps"] == pytest.approx(4.2e6, rel=0.02) for goal in result["goals"])


def test_a_preset_is_the_goal_and_has_its_own_durations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_json(tmp_path, "--preset", "csit-ndr")["goal"]["name"] == "csit-ndr"
    assert main(["search", "--generator", "sim", "--preset", "csit-ndr", "--final-duration", "30"]) == 2
    assert "--preset: leave out final_duration, which the preset csit-ndr has" in capsys.readouterr().err


def test_options_reach_the_search(tmp_path: Path) -> None:
    result = run_json(
        tmp_path,
        "--precision",
        "0.05",
        "--final-duration",
        "5",
        "--line-rate-pps",
        "6e6",
        "--frame-size",
        "128",
        "--flows",
        "9",
    )
    lower, upper = result["bounds_pps"]
    assert lower * 1.005 < upper <= lower * 1.05 + 0.02
    full = [t for t in result["trial_log"] if t["duration_s"] == 5]
    assert full and result["trial_log"][0]["rate_pps"] == 6e6
    assert {(t["frame_size"], t["flows"]) for t in result["trial_log"]} == {(128, 9)}
    assert run_json(tmp_path, "--max-loss-ratio", "0.02")["zero_loss_pps"] > 4.25e6


def test_repeats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_json(tmp_path, "--sim-device", "noisy", "--repeats", "7")
    repeats = result["repeats"]
    answers = sorted(repeats["answers_pps"])
    assert repeats["count"] == 7 and result["zero_loss_pps"] == answers[3]
    assert repeats["spread"]["interval_pps"] == [answers[0], answers[6]]
    assert repeats["spread"]["confidence"] == pytest.approx(1 - 2 / 2**7)
    assert {t["repeat"] for t in result["trial_log"]} == set(range(7))
    assert "98.4% confidence" in capsys.readouterr().out


def test_the_seed_makes_it_the_same(tmp_path: Path) -> None:
    def answer(*options: str) -> Any:
        result = run_json(tmp_path, "--sim-device", "noisy", *options)
        return result["zero_loss_pps"], result["trial_log"]

    assert answer("--seed", "5") == answer("--seed", "5") != answer("--seed", "6")


def test_a_result_can_be_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    result = run_json(tmp_path, "--sim-device", "negative-counters", "--repeats", "3", "--goal", "csit-ndr")
    assert result["invalid_trials"] > 0
    assert main(["replay", str(file)]) == 0
    assert "the same answer" in capsys.readouterr().out
    result["zero_loss_pps"] = 1.0
    file.write_text(json.dumps(result))
    assert main(["replay", str(file)]) == 1
    result["trial_log"][0]["rate_pps"] = 5.0
    file.write_text(json.dumps(result))
    assert main(["replay", str(file)]) == 1


def test_json_on_standard_output_is_alone_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SIM, "--json", "-"]) == 0
    streams = capsys.readouterr()
    assert json.loads(streams.out)["verdict"] == "ndr"
    assert streams.err.count("trial ") >= 4 and "full length" in streams.err


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["--precision", "0"], "--precision"),
        (["--precision", "0.9"], "--precision"),
        (["--precision", "nan"], "--precision"),
        (["--precision", "much"], "--precision"),
        (["--line-rate-pps", "-1"], "--line-rate-pps"),
        (["--line-rate-pps", "inf"], "--line-rate-pps"),
        (["--final-duration", "0"], "--final-duration"),
        (["--max-loss-ratio", "-0.1"], "--max-loss-ratio"),
        (["--max-loss-ratio", "1"], "--max-loss-ratio"),
        (["--repeats", "0"], "--repeats"),
        (["--repeats", "1.5"], "--repeats"),
        (["--seed", "-1"], "--seed"),
        (["--frame-size", "10"], "--frame-size"),
        (["--sim-device", "teapot"], "--sim-device"),
        (["--exec-cmd", "true"], "--exec-cmd"),
        (["--json", "/no/such/folder/x.json"], "--json"),
        (["--json", "/"], "--json"),
        (["--goal", "best"], "--goal"),
        (["--generator", "ixia"], "--generator"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], arguments: list[str], option: str
) -> None:
    try:
        status: Any = main([*SIM, *arguments])
    except SystemExit as end:
        status = end.code
    streams = capsys.readouterr()
    assert status == 2 and option in streams.err
    assert "trial " not in streams.err, "something was sent"


def test_exec(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = Program(tmp_path, DEVICE)
    file = tmp_path / "result.json"
    arguments = [
        "search",
        "--generator",
        "exec",
        "--exec-cmd",
        program.command,
        "--json",
        str(file),
    ]
    assert main(arguments) == 0
    result = json.loads(file.read_text())
    assert result["zero_loss_pps"] <= 3.3e6 <= result["bounds_pps"][1]
    assert result["environment"]["generator"] == "small"
    assert result["evidence"]["places_at_upper"].keys() == {"ring"}


def test_exec_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exec_search = ["search", "--generator", "exec", "--answer-timeout", "1"]
    assert main(exec_search) == 2
    assert "--exec-cmd" in capsys.readouterr().err
    assert main([*exec_search, "--exec-cmd", "/no/such/program"]) == 2
    assert "--exec-cmd: /no/such/program: there is no such program" in capsys.readouterr().err
    dying = Program(tmp_path, f"def answer(q): return {HELLO} if q['op'] == 'hello' else sys.exit(9)")
    assert main([*exec_search, "--exec-cmd", dying.command]) == 2
    assert "status 9" in capsys.readouterr().err
    good = Program(tmp_path, GOOD)
    assert main([*exec_search, "--exec-cmd", good.command, "--sim-device", "clean"]) == 2
    assert "--sim-device" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 99}', '{"format": 1, "plan": {}}', "\x00"])
def test_a_file_that_is_no_result_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    file = tmp_path / "broken.json"
    file.write_text(text)
    assert main(["replay", str(file)]) == 2
    assert "broken.json" in capsys.readouterr().err
    assert main(["replay", str(tmp_path / "absent.json")]) == 2


# -- evaluate ------------------------------------------------------------------------------------

EVALUATE = ("evaluate", "--runs", "6", "--jobs", "1", "--seed", "2")


def rows(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert main([*EVALUATE, "--quiet", "--format", "json", *arguments]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def test_evaluate_against_known_answers(capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(capsys, "--devices", "clean,short-generator", "--algorithms", "zeroloss,binary,binary-abort")
    assert [(r["device"], r["algorithm"]) for r in found] == [
        (device, algorithm)
        for device in ("clean", "short-generator")
        for algorithm in ("zeroloss", "binary", "binary-abort")
    ]
    ours, binary, abort, limited, fooled, _ = found
    assert (ours["trials"], binary["trials"], binary["traffic_s"]) == (4, 9, 540)
    assert ours["traffic_s"] <= 61 < abort["traffic_s"] < binary["traffic_s"]
    assert abs(ours["error"]) <= 0.005 and ours["p_soak"] == 0
    assert limited["verdicts"] == {"generator_limited": 6} and limited["median_pps"] is None
    # A plain search assumes a generator that sent a fifth of what was asked.
    assert fooled["verdicts"] == {"ndr": 6} and fooled["median_pps"] > 14e6


def test_evaluate_is_the_same_with_any_number_of_processes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ("--devices", "noisy,glitch-random", "--algorithms", "zeroloss", "--runs", "12")
    one = rows(capsys, *options)
    two = rows(capsys, *options, "--jobs", "2")
    assert one == two != rows(capsys, *options, "--seed", "3")


def test_evaluate_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    options = (*EVALUATE, "--devices", "clean,glitch", "--algorithms", "zeroloss")
    assert main(options) == 0
    streams = capsys.readouterr()
    lines = streams.out.splitlines()
    assert len(lines) == 4 and len({len(line) for line in lines}) == 1
    assert "6 floor (floor)" in lines[3] and "6 ndr (ndr)" in lines[2]
    assert "12 of 12 searches" in streams.err


def test_evaluate_refuses_what_it_does_not_know(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for option in ("--devices", "--algorithms"):
        assert main([*EVALUATE, option, "teapot"]) == 2
        assert f"{option}: no 'teapot'" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "MLRsearch", None)
    assert main([*EVALUATE, "--algorithms", "mlrsearch"]) == 2
    assert "./tools/trex[evaluate]" in capsys.readouterr().err


def test_mlrsearch_finds_the_rate_in_less_traffic_if_it_aborts(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        algorithms.usable(["mlrsearch"])
    except UnusableInput as error:
        pytest.skip(str(error))
    options = ("--devices", "clean", "--algorithms", "mlrsearch,mlrsearch-abort", "--runs", "2")
    plain, abort = rows(capsys, *options)
    assert plain["verdicts"] == abort["verdicts"] == {"ndr": 2}
    assert abs(plain["error"]) <= 0.005 and abs(abort["error"]) <= 0.005
    assert abort["traffic_s"] < plain["traffic_s"]


def test_the_script_runs_from_a_checkout(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools/trex/zeroloss.py"), *SIM, "--quiet"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "") and "zero-loss  4.19 Mpps  (" in done.stdout


def test_the_agent_does_not_import_it() -> None:
    code = (
        "import sys, agents.main, netplugin.cli.main;"
        "sys.exit(any(m.startswith('netplugin_zeroloss') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0

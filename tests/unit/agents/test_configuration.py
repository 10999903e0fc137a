"""What an operator is told of a wrong configuration: the file, the section and the option."""

from __future__ import annotations

import io
import json
import logging
import re
import threading
from pathlib import Path

import pytest

from agents import backends, main
from netplugin import options
from netplugin.api.client import Client
from netplugin.host.shared import Host
from tests.unit.agent import agent, served_agent


def started(tmp_path: Path, text: str) -> int:
    file = tmp_path / "b.conf"
    file.write_text(f"[DEFAULT]\nstate_path = {tmp_path / 'state'}\n{text}\n")
    return main.main(["--config-file", str(file)])


@pytest.mark.parametrize(
    ("text", "option"),
    [
        ("[api]\nbind_port = abc", "[api] option bind_port"),
        ("[agent]\nbatch_size = many", "[agent] option batch_size"),
        ("[agent]\nreconcile_interval = -1", "[agent] option reconcile_interval"),
        ("log_level = LOUD", "[DEFAULT] option log_level"),
    ],
)
def test_a_wrong_value(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, option: str) -> None:
    assert started(tmp_path, text) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"netplugin-agent: {option} in {tmp_path / 'b.conf'} is not valid: ")
    assert "LocationInfo" not in printed and "literal" not in printed
    assert not (tmp_path / "state").exists()


def test_a_file_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--config-file", str(tmp_path)]) == 2
    assert f"--config-file {tmp_path} is a directory" in capsys.readouterr().err
    tokens = "[api]\nbind_host = 127.0.0.1\ntoken_file = /nope"
    assert started(tmp_path, tokens) == 2
    assert "[api] token_file /nope cannot be read: No such file or directory" in capsys.readouterr().err


def test_a_state_path_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "state").touch()
    assert started(tmp_path, "") == 1
    assert f"[DEFAULT] state_path {tmp_path / 'state'}: " in capsys.readouterr().err


def test_what_no_option_takes_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "b.conf"
    file.write_text(
        "[DEFAULT]\nstate-path = /x\nlog_levle = INFO\n[agent]\nreconcile_intervall = 1\n"
        "[ovss]\nuplinks = a\n[sriov]\nnot_enabled_here = 1\n"
    )
    found = list(options.unknown(options.load([file])))
    assert [finding.found for finding in found] == [
        f"{file}: [DEFAULT] has no option log_levle: it is ignored; did you mean log_level?",
        f"{file}: [agent] has no option reconcile_intervall: it is ignored; did you mean reconcile_interval?",
        f"{file}: there is no section [ovss]: it is ignored; did you mean ovs?",
    ]
    assert len({finding.id for finding in found}) == 3


def test_the_options_of_a_loaded_backend_are_known(tmp_path: Path) -> None:
    file = tmp_path / "b.conf"
    file.write_text("[linuxbridge]\nphysical_interfaces = physnet1:\nphysical_interface = physnet1:\n")
    conf = options.load([file])
    assert set(backends.load(["linuxbridge"], conf, Host(conf)).backends) == {"linuxbridge"}
    [finding] = options.unknown(conf)
    assert "[linuxbridge] has no option physical_interface: it is ignored; did you mean" in finding.found


def test_a_backend_with_a_wrong_option_is_a_sentence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "b.conf"
    file.write_text("[linuxbridge]\nphysical_interfaces = physnet1\n")
    conf = options.load([file])
    loaded = backends.load(["linuxbridge"], conf, Host(conf))
    assert f"option physical_interfaces in {file} is not valid" in loaded.broken["linuxbridge"]
    [record] = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert loaded.broken["linuxbridge"].removeprefix("could not be loaded: ") in record.getMessage()
    assert not record.exc_info and "LocationInfo" not in record.getMessage()


def test_a_misspelled_backend_is_reported_with_those_that_exist(
    caplog: pytest.LogCaptureFixture,
) -> None:
    conf = options.load([])
    reason = backends.load(["linuxbrigde"], conf, Host(conf)).broken["linuxbrigde"]
    assert "correct [agent] enabled_backends" in reason and "linuxbridge" in reason
    assert reason in caplog.text


def test_a_check_names_all_that_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "b.conf"
    file.write_text(
        f"[DEFAULT]\nstate_path = {tmp_path / 'state'}\nlog_levle = x\n[agent]\nbatch_size = many\n"
        "[vdpa]\nmode = fast\n"
    )
    assert main.main(["--check", str(file)]) == 2
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == 3 and all(line.startswith("netplugin-agent: ") for line in printed)
    assert "[agent] option batch_size" in printed[0] and "[vdpa] option mode" in printed[1]
    assert "did you mean log_level?" in printed[2]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[ovs]\nuplinks = x\n", "[ovs] uplinks: 'x' is not physical_network:device"),
        ("[host]\npmd_cores = 5000\n", "[host] pmd_cores: must be at most 4096"),
        ("[api]\nbind_host = 192.0.2.1\n", "needs tls_cert and tls_key"),
        ("[tasks]\ncallback_cert = /x\n", "callback_cert and callback_key go together"),
        ("[agent]\nenabled_backends = sriov\n[sriov]\ndevices = x\n", "[sriov] devices: "),
        ("[agent]\nenabled_backends = srivo\n", "did you mean sriov?"),
    ],
)
def test_a_check_reads_what_a_start_would(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    file = tmp_path / "b.conf"
    file.write_text(f"[DEFAULT]\nstate_path = {tmp_path / 'state'}\n{text}")
    assert main.main(["--check", str(file)]) == 2
    printed = capsys.readouterr().err
    assert words in printed and printed.count("\n") == 1


def test_a_check_of_a_valid_file_starts_and_touches_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "b.conf"
    file.write_text(
        f"[DEFAULT]\nstate_path = {tmp_path}/state\n[api]\nsocket = {tmp_path}/run/s\n"
        f"audit_log = {tmp_path}/audit\n[ovs]\nvhost_socket_dir = {tmp_path}/vhost\n"
        "[agent]\nenabled_backends = linuxbridge,dpdkvhostuser,sriov,vdpa\n"
    )
    before = threading.active_count()
    assert main.main(["--check", str(file)]) == 0
    assert capsys.readouterr().out == f"{file}: no mistakes found\n"
    assert list(tmp_path.iterdir()) == [file] and threading.active_count() == before


def test_an_option_that_is_ignored_is_a_finding(tmp_path: Path) -> None:
    file = tmp_path / "b.conf"
    file.write_text("[agent]\nbatch_szie = 1\n")
    ignored = tuple(options.unknown(options.load([file])))
    with agent(tmp_path) as made:
        made.service.health.ignored = ignored
        with served_agent(made) as url, Client(url) as client:
            [found] = [each for each in client.checks() if each.id == "option-agent-batch_szie"]
    assert found.status == "warn" and "did you mean batch_size?" in found.found and found.fix


@pytest.mark.parametrize("terminal", [True, False])
def test_the_log_is_text_on_a_terminal_and_json_elsewhere(
    monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    monkeypatch.setattr("sys.stderr", stream)
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", list(root.handlers))
    monkeypatch.setattr(root, "level", root.level)
    main._log_to_stderr("INFO")
    logging.getLogger("agents.x").warning("it is late", extra={"port_id": "p1"})
    line = stream.getvalue()
    if terminal:
        assert re.fullmatch(r"\d\d:\d\d:\d\d WARNING it is late \(port p1\)\n", line)
    else:
        assert json.loads(line)["port_id"] == "p1"

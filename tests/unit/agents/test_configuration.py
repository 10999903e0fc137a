"""What an operator is told of a wrong configuration: the file, the section and the option."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from agents import backends, main
from netplugin import options
from netplugin.host.shared import Host


def started(tmp_path: Path, text: str) -> int:
    file = tmp_path / "b.conf"
    file.write_text(f"[DEFAULT]\nstate_path = {tmp_path / 'state'}\n{text}\n")
    return main.main(["--config-file", str(file)])


@pytest.mark.parametrize(
    ("text", "option"),
    [
        ("[api]\nbind_port = abc", "[api] option bind_port"),
        ("[agent]\nreconcile_interval = -1", "[agent] option reconcile_interval"),
        ("log_level = LOUD", "[DEFAULT] option log_level"),
    ],
)
def test_a_wrong_value(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, option: str) -> None:
    assert started(tmp_path, text) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"netplugin-agent: {option} in {tmp_path / 'b.conf'} is not valid: ")
    assert "LocationInfo" not in said
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


def test_what_no_option_takes_is_told(tmp_path: Path) -> None:
    file = tmp_path / "b.conf"
    file.write_text(
        "[DEFAULT]\nstate-path = /x\nlog_levle = INFO\n[agent]\nreconcile_intervall = 1\n"
        "[ovss]\nuplinks = a\n[sriov]\nnot_enabled_here = 1\n"
    )
    assert list(options.unread(options.load([file]))) == [
        f"{file}: [DEFAULT] has no option log_levle: it is ignored",
        f"{file}: [agent] has no option reconcile_intervall: it is ignored",
        f"{file}: there is no section [ovss]: it is ignored",
    ]


def test_the_options_of_a_loaded_backend_are_known(tmp_path: Path) -> None:
    file = tmp_path / "b.conf"
    file.write_text("[linuxbridge]\nphysical_interfaces = physnet1:\nphysical_interface = physnet1:\n")
    conf = options.load([file])
    assert set(backends.load(["linuxbridge"], conf, Host(conf)).backends) == {"linuxbridge"}
    assert list(options.unread(conf)) == [
        f"{file}: [linuxbridge] has no option physical_interface: it is ignored"
    ]


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


def test_a_misspelled_backend_is_told_with_those_that_there_are(
    caplog: pytest.LogCaptureFixture,
) -> None:
    conf = options.load([])
    said = backends.load(["linuxbrigde"], conf, Host(conf)).broken["linuxbrigde"]
    assert "correct [agent] enabled_backends" in said and "linuxbridge" in said
    assert said in caplog.text

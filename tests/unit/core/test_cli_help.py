"""The help of the three commands: each option has one, within 80 columns, and a misspelling is answered."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from importlib.metadata import version

import pytest
from netplugin_zeroloss.cli.main import parser as zeroloss_parser

from agents import configuration, main
from netplugin.cli.main import Netplugin
from netplugin.cli.main import main as netplugin
from netplugin.spelling import did_you_mean

WIDTH = 80


def parsers() -> Iterator[argparse.ArgumentParser]:
    """Those of all commands."""
    app = Netplugin()
    app.close()
    yield app.parser
    for name, entry in app.command_manager:
        yield entry.load()(app, None).get_parser(f"netplugin {name}")
    yield from below(zeroloss_parser())
    yield main.parser()


def below(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from below(each)


def test_each_option_has_help_and_no_line_is_wider_than_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    seen = 0
    for parser in parsers():
        seen += 1
        nameless = [action.option_strings or action.dest for action in parser._actions if not action.help]
        assert not nameless, parser.prog
        assert not [line for line in parser.format_help().splitlines() if len(line) > WIDTH], parser.prog
        assert parser.description, parser.prog
    assert seen > 50


def test_the_list_of_commands_fits_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    with pytest.raises(SystemExit):
        netplugin(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert not [line for line in lines if len(line) > WIDTH]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("prot list", "there is no command prot list; did you mean port list?"),
        ("port lst p1", "there is no command port lst; did you mean port list?"),
        ("port", "port is not a whole command: it needs one of counters, delete, list,"),
        ("xyzzy", "there is no command xyzzy; netplugin --help lists the commands"),
        ("--verbos port list", "there is no option --verbos before the command"),
        ("port list --vmid x", "unrecognized arguments: --vmid x; did you mean --vm-id?"),
        ("port list --state actve", "did you mean active?"),
        ("port put p1 --vlan-id ten", "argument --vlan-id: 'ten' is no whole number"),
        ("pmd show --interval soon", "argument --interval: 'soon' is no number of seconds"),
    ],
)
def test_a_misspelling_is_answered_with_what_was_meant(
    capsys: pytest.CaptureFixture[str], line: str, words: str
) -> None:
    try:
        status = netplugin(line.split())
    except SystemExit as ended:
        status = int(ended.code or 0)
    printed = capsys.readouterr()
    assert (status, printed.out) == (2, "") and words in printed.err


def test_the_other_commands_answer_in_the_same_way(capsys: pytest.CaptureFixture[str]) -> None:
    for parser, arguments, words in (
        (zeroloss_parser(), ["serch"], "did you mean search?"),
        (zeroloss_parser(), ["search", "--generator", "smi"], "did you mean sim?"),
        (main.parser(), ["--chek", "x"], "did you mean --check?"),
    ):
        with pytest.raises(SystemExit) as ended:
            parser.parse_args(arguments)
        assert ended.value.code == 2 and words in capsys.readouterr().err


def test_each_command_names_itself_and_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    for run in (netplugin, main.parser().parse_args, zeroloss_parser().parse_args):
        with pytest.raises(SystemExit) as ended:
            run(["--version"])
        assert not ended.value.code
    printed = capsys.readouterr().out.splitlines()
    assert printed == [
        f"netplugin {version('netplugin')}",
        f"netplugin-agent {version('netplugin')}",
        f"netplugin-zeroloss {version('netplugin-zeroloss')}",
    ]


def test_only_a_close_name_is_meant() -> None:
    assert did_you_mean("linuxbrigde", ["sriov", "linuxbridge"]) == "; did you mean linuxbridge?"
    assert did_you_mean("ovn", ["sriov", "linuxbridge"]) == ""


def test_a_backend_that_is_misspelled_in_the_configuration_is_named() -> None:
    assert "did you mean linuxbridge?" in configuration.not_installed("linuxbrigde")

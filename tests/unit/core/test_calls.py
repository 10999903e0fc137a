"""The calls that the agent's texts name are commands where the command line prints them."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from netplugin.calls import as_commands
from netplugin.cli.main import Netplugin

ROOT = Path(__file__).resolve().parents[3]
CALL = re.compile(r"\b(GET|PUT|POST|DELETE) /v1/")
COMMAND = re.compile(r"netplugin ((?:[a-z-]+ ?)+)((?:--[a-z-]+(?: [\w-]+)? ?)*)")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("PUT /v1/networks/net-1 again", "netplugin network put net-1 again"),
        ("or DELETE /v1/physical-networks/physnet1", "or netplugin physical-network delete physnet1"),
        ("GET /v1/ports/p.1 shows it", "netplugin port show p.1 shows it"),
        ("GET /v1/ports.", "netplugin port list."),
        ("see GET /v1/vfs", "see netplugin vf list"),
        ("DELETE /v1/vfs/0000:03:10.0/quarantine", "netplugin vf release 0000:03:10.0"),
        ('PUT /v1/pmd {"proposed": true}', "netplugin pmd set --proposed"),
        ('PUT /v1/pmd {"count": 4}, or fewer', "netplugin pmd set --count 4, or fewer"),
        ('PUT /v1/pmd {"clear_affinity": ["PORT"]}', "netplugin pmd set --clear-affinity PORT"),
        (
            'PUT /v1/pmd {"auto_load_balance": {"enabled": true, "load_threshold": 74}}',
            "netplugin pmd set --auto-lb on --auto-lb-load 74",
        ),
        (
            'POST /v1/vms/VM:render-domain {"policy": {"pin": true}}',
            "netplugin domain render VM --pin",
        ),
        ('POST /v1/reconcile {"remove_orphans": true}', "netplugin reconcile --remove-orphans"),
        ("GET it, and send If-Match with its ETag", "show it, and give --if-match with its etag"),
        ("delete the port and PUT it again", "delete the port and put it again"),
        ("INPUT stays, and so do 'a {b}'", "INPUT stays, and so do 'a {b}'"),
    ],
)
def test_a_call_is_the_command_that_does_it(text: str, words: str) -> None:
    assert as_commands(text) == words


def texts() -> Iterator[str]:
    """The string constants of the sources, without docstrings; a part in braces is a name."""
    for part in ("agents", "drivers", "netplugin"):
        for file in (ROOT / part).rglob("*.py"):
            source = file.read_text()
            if "/v1/" not in source or file.name in ("calls.py", "docgen.py", "options.py"):
                continue
            tree = ast.parse(source)
            docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
            inner = {
                id(value)
                for node in ast.walk(tree)
                if isinstance(node, ast.JoinedStr)
                for value in ast.walk(node)
                if value is not node
            }
            for node in ast.walk(tree):
                if id(node) in docs or id(node) in inner:
                    continue
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value
                elif isinstance(node, ast.JoinedStr):
                    yield "".join(
                        str(value.value) if isinstance(value, ast.Constant) else "1" for value in node.values
                    )


def test_each_call_in_a_text_of_the_agent_is_a_command_that_there_is() -> None:
    app = Netplugin()
    app.close()
    named = [text for text in texts() if CALL.search(text)]
    assert len(named) > 30
    for text in named:
        command_text = as_commands(text)
        assert "/v1/" not in command_text, text
        for words, options in COMMAND.findall(command_text):
            factory, name, _ = app.command_manager.find_command(command_of(app, words))
            known = factory(app, None).get_parser(name)._option_string_actions
            assert {word for word in shlex.split(options) if word.startswith("--")} <= set(known), (
                command_text
            )


def command_of(app: Netplugin, words: str) -> list[str]:
    """The longest command that these words begin with."""
    found = words.split()
    while found and " ".join(found) not in app.command_manager.commands:
        found.pop()
    return found

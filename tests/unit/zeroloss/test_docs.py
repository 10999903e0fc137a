"""The commands of docs/zeroloss.md and docs/zeroloss, as they are listed, with what they print."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
from netplugin_zeroloss.cli.main import parser
from netplugin_zeroloss.matrix.description import Search
from netplugin_zeroloss.search.result import EXTENSIONS
from netplugin_zeroloss.search.trials import SearchVerdict
from netplugin_zeroloss.values import Measurement

from tests.docs.blocks import ROOT, SESSIONS, session
from tests.functional.docs.shell import carry_out
from tests.lab.processes import LabError

PAGE = "".join(page.read_text(encoding="utf-8") for page in SESSIONS["zeroloss"])


def test_the_session(tmp_path: Path) -> None:
    """From the checkout; the page writes to /tmp, the test does not."""
    steps = session("zeroloss")
    assert len(steps) >= 4 and all(output for _, output in steps)
    carry_out("zeroloss", tmp_path / "log", cwd=ROOT, scratch=tmp_path)
    assert json.loads((tmp_path / "clean.json").read_text())["verdict"] == "ndr"


def test_a_session_that_prints_something_else_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [(block, output), *_] = session("zeroloss")
    assert output is not None
    wrong = type(output)(**{**vars(output), "text": output.text.replace("4.19 ", "4.2 ")})
    command = type(block)(**{**vars(block), "text": block.text.replace("/tmp/", f"{tmp_path}/")})
    monkeypatch.setattr("tests.functional.docs.shell.session", lambda name: [(command, wrong)])
    with pytest.raises(LabError):
        carry_out("zeroloss", tmp_path / "log", cwd=ROOT)


def test_verdicts_commands_and_fields_are_all_there() -> None:
    for verdict in SearchVerdict:
        assert f"| `{verdict}` |" in PAGE
    commands = parser()._subparsers
    assert commands is not None
    for action in commands._group_actions:
        assert action.choices is not None
        for name in action.choices:
            assert f"| `{name}` |" in PAGE
    for field in fields(Measurement):
        assert f"`{field.name}`" in PAGE, field.name


def test_extensions_and_parameters_of_a_search_are_all_there() -> None:
    method = (ROOT / "docs/zeroloss/method.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)`: ", method, re.MULTILINE) == EXTENSIONS
    example = (ROOT / "tools/trex/matrix.yaml").read_text(encoding="utf-8")
    for field in Search.model_fields:
        assert re.search(rf"^ +(# )?{field}: ", example, re.MULTILINE), field

"""The word list of the lint environment: what it reads, what it leaves out, and what it prints."""

from configparser import ConfigParser
from pathlib import Path

import pytest
import yaml

from tests.docs.blocks import ROOT
from tests.lint import names
from tests.lint.dead import entry_points
from tests.lint.words import LIST, Word, read_list, search

WORDS = {"anew": "again", "asked for": "requested"}
CODE = '''"""Begin anew.

It was asked
for.
"""

anew = {"anew": "``anew`` is a name"}  # anew, or `again`
raise ValueError(f"port {anew} was asked " "for now")
'''
PAGE = """Start anew.

```
anew
```

A row `again`, renewed.
"""


def test_prose_of_a_module_is_read_and_its_code_is_not() -> None:
    found = [(word.line, word.text) for word in search(Path("a.py"), CODE, WORDS)]
    assert found == [(1, "anew"), (3, "asked for"), (7, "anew"), (8, "asked for")]


def test_a_page_is_read_without_its_code() -> None:
    assert list(search(Path("a.md"), PAGE, WORDS)) == [Word(Path("a.md"), 1, "anew", "again")]


def test_names_are_read_by_their_words_where_they_are_defined() -> None:
    module = (
        "class AnewReader:\n    READ_ANEW = 1\n\ndef f(asked_for, *, anew2):\n    lib.anew(anew=1).anew = 2"
    )
    found = [(word.line, word.text) for word in names.search(Path("a.py"), module, WORDS)]
    assert found == [(1, "AnewReader"), (2, "READ_ANEW"), (4, "asked_for"), (5, "anew")]
    assert (
        list(names.search(Path("a.py"), "renewed = evidence = 1", WORDS | {"evidence": "attribution"})) == []
    )


def test_each_word_of_the_list_has_a_better_one() -> None:
    words = read_list(LIST.read_text())
    assert words["anew"] == "again"
    for better in words.values():
        assert not list(search(Path("a.md"), better, words)), better
    with pytest.raises(ValueError, match="anew"):
        read_list("anew")


def test_entry_points_are_not_dead_code() -> None:
    assert {"main", "PortList", "Sriov", "list_opts"} <= set(entry_points())


def test_the_hooks_run_what_the_lint_environment_runs() -> None:
    config = ConfigParser(interpolation=None)
    config.read(ROOT / "tox.ini")
    commands = config["testenv:lint"]["commands"].splitlines()
    [repo] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    for hook in repo["hooks"]:
        program = hook["entry"].removeprefix(".tox/lint/bin/").removesuffix(" --force-exclude")
        assert program != hook["entry"]
        assert any(command.startswith(program) for command in commands), program

"""``python -m tests.lint.names PATH...``: list the names that modules define with words of words.txt.

A name is split into its words (``desiredRows`` and ``DESIRED_ROWS`` both have ``desired rows``); phrases are
found too. Names are read where they are defined, as those of libraries cannot be chosen. Prints
``file:line: name -> better word`` for each and exits with 1 if there are any.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.lint.words import LIST, Word, read_list

#: Keys of the JSON that users read.
_KEYS_OF_RESULTS = frozenset({"evidence"})
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def words_of(name: str) -> str:
    """Return the words of a name in lower case, with a space between."""
    return " ".join(_HUMP.sub("_", name).lower().replace("_", " ").split())


def defined(module: str) -> Iterator[tuple[int, str]]:
    """Yield line and name of each definition in the source of a module, in no order."""
    for node in ast.walk(ast.parse(module)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case (
                ast.arg(arg=name)
                | ast.Name(id=name, ctx=ast.Store())
                | ast.Attribute(attr=name, ctx=ast.Store())
            ):
                yield node.lineno, name


def search(path: Path, module: str, words: dict[str, str]) -> Iterator[Word]:
    """Yield each definition in ``module`` that has one of ``words``."""
    any_word = re.compile(rf"\b(?:{'|'.join(words)})\b")
    for line, name in sorted(defined(module)):
        if name in _KEYS_OF_RESULTS:
            continue
        for match in any_word.finditer(words_of(name)):
            better = next(word for pattern, word in words.items() if re.fullmatch(pattern, match[0]))
            yield Word(path, line, name, better)


def main(paths: list[str]) -> int:
    asked = ["git", "ls-files", "--", *paths]
    listed = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()
    words, found = read_list(LIST.read_text()), []
    for path in map(Path, listed):
        if path.suffix == ".py" and path.exists():
            found += search(path, path.read_text(), words)
    for word in found:
        print(f"{word.path}:{word.line}: {word.text} -> {word.better}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

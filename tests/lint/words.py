"""``python -m tests.lint.words PATH...``: list the words of words.txt that pages and modules use.

Prints ``file:line: word -> better word`` for each and exits with 1 if there are any. Of a module, comments,
docstrings and messages are read. Names of code (in back quotes or a fenced block) and strings of one word
are not.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LIST = Path(__file__).with_name("words.txt")
#: Comments, and strings of each form with their prefix and quotes.
_PYTHON = re.compile(
    r"#[^\n]*"
    r'|\b[bBfFrRuU]{1,2}(?=["\'])'
    r'|"""(?:[^\\]|\\.)*?"""|\'\'\'(?:[^\\]|\\.)*?\'\'\''
    r'|"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)*\'',
    re.DOTALL,
)
_FIELD = re.compile(r"\{[^{}]*\}")
_CODE = re.compile(r"^ *```.*?^ *```|``[^`]+``|`[^`]+`", re.DOTALL | re.MULTILINE)


class Word(NamedTuple):
    """A word that is not used, found at ``line`` of ``path``."""

    path: Path
    line: int
    text: str
    better: str


def read_list(text: str) -> dict[str, str]:
    """Return the better word by pattern. A line is ``pattern -> better word``; ``#`` starts a comment.

    Raises: ValueError for any other line.
    """
    found = {}
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        pattern, arrow, better = (part.strip() for part in line.partition("->"))
        if not (pattern and arrow and better):
            raise ValueError(f"expected `word -> better word`, not {line!r}")
        found[pattern] = better
    return found


def prose(path: Path, text: str) -> str:
    """Return the text with what is not prose masked: the lines stay the same."""
    if path.suffix == ".py":
        parts, end = [], 0
        for match in _PYTHON.finditer(text):
            parts += [_hide(text[end : match.start()]), _words_of(match[0])]
            end = match.end()
        text = "".join([*parts, _hide(text[end:])])
    return _CODE.sub(lambda code: _hide(code[0]), text)


def _words_of(token: str) -> str:
    """Return a comment or string without signs and quotes: a phrase may go on in the next one."""
    if token[0] not in "#\"'":
        return ""
    quotes = 3 if token[:3] in ('"""', "'''") else 1
    words = token.replace("#", " ") if token[0] == "#" else token[quotes:-quotes]
    return f" {_FIELD.sub(lambda field: _hide(field[0]), words)} " if " " in words.strip() else _hide(words)


def _hide(text: str) -> str:
    return text if not text or text.isspace() else "\0" + "\n" * text.count("\n") + "\0"


def search(path: Path, text: str, words: dict[str, str]) -> Iterator[Word]:
    """Yield each use of one of ``words`` in the prose of ``text``."""
    any_word = re.compile(rf"\b(?:{'|'.join(words)})\b".replace(" ", r"\s+"))
    read = prose(path, text).lower()
    for match in any_word.finditer(read):
        found = " ".join(match[0].split())
        better = next(word for pattern, word in words.items() if re.fullmatch(pattern, found))
        yield Word(path, read.count("\n", 0, match.start()) + 1, found, better)


def main(paths: list[str]) -> int:
    asked = ["git", "ls-files", "--", *paths]
    listed = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()
    words, found = read_list(LIST.read_text()), []
    for path in map(Path, listed):
        if path.suffix in (".py", ".md") and path.exists():
            found += search(path, path.read_text(), words)
    for word in found:
        print(f"{word.path}:{word.line}: {word.text} -> {word.better}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

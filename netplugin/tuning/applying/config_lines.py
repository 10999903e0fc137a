"""Find, replace and remove a ``NAME=value`` line in the text of a file under /etc (pure)."""

from __future__ import annotations

import re

from netplugin.tuning.applying.place import Raw


def last_line(name: str, text: str | None) -> Raw:
    """The last line that sets ``name``, empty if no line does, None if there is no file."""
    if text is None:
        return None
    found = _lines(name, text)
    return found[-1][0] if found else ""


def value_of(raw: Raw) -> str | None:
    return (raw or "").partition("=")[2].strip() or None


def with_line(name: str, text: str, line: Raw) -> str:
    """Return the text with ``line`` in place of the last such line, or appended; an empty line removes it."""
    found = _lines(name, text)
    begin, end = found[-1].span() if found else (len(text), len(text))
    if line and found:
        return text[:begin] + line + text[end:]
    if line:
        return f"{text}{line}\n" if not text or text.endswith("\n") else f"{text}\n{line}"
    if not found:
        return text
    # A line appended to a file without a final newline was written with the newline before it.
    return text[:begin] + text[end + 1 :] if end < len(text) else text[: max(0, begin - 1)]


def _lines(name: str, text: str) -> list[re.Match[str]]:
    return list(re.finditer(rf"^{re.escape(name)}[ \t]*=.*$", text, re.MULTILINE))

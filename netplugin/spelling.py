"""What was meant by a misspelled name: of an option, a command, a backend, a section of the configuration."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from typing import NoReturn


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """A clause with the closest of these names, to be added to a sentence; empty if none is close."""
    from difflib import get_close_matches  # only who has made a mistake waits for it

    close = get_close_matches(name, sorted(names), n=1)
    return f"; did you mean {close[0]}?" if close else ""


class Parser(argparse.ArgumentParser):
    """argparse, whose errors name the option or the command that was meant."""

    def error(self, message: str) -> NoReturn:
        _, is_unknown, unknown = message.partition("unrecognized arguments: ")
        for word in unknown.split() if is_unknown else ():
            if word.startswith("--"):
                message += did_you_mean(word.partition("=")[0], self._option_string_actions)
        if choice := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message):
            message += did_you_mean(choice[1], re.findall(r"[\w.-]+", choice[2]))
        super().error(message)

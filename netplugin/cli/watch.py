"""``--watch``: a command that prints again whenever something has happened on the host."""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, Namespace
from typing import Any

from netplugin.api.errors import BackendUnavailable, OperationTimeout
from netplugin.cli import show

_EVENTS = "/v1/events"
#: What happens together is printed together; and how often an agent that has ended is looked for.
_TOGETHER_S, _AGAIN_S = 0.3, 1.0


class Watches(show.Asks):
    """A command with ``--watch``."""

    def get_parser(self, prog_name: str) -> ArgumentParser:
        parser = super().get_parser(prog_name)
        words = "print it again after each change, until it is interrupted"
        show.flag(parser, "--watch", words)
        return parser

    def events(self, parsed_args: Namespace) -> dict[str, Any]:
        """The query of the events after which it is printed again."""
        return {}

    def carry_out(self, parsed_args: Namespace) -> int:
        if not parsed_args.watch:
            return super().carry_out(parsed_args)
        printed = is_away = False
        while True:
            try:
                # What has happened until now is in what is printed next.
                now = self.read(_EVENTS, seconds=0.001).body.decode().partition("\n")[0]
                if sys.stdout.isatty():
                    sys.stdout.write("\x1b[H\x1b[2J")  # it is cleared
                super().carry_out(parsed_args)
                self.app.stdout.flush()
                printed, is_away = True, False
                # An agent that ends tells no number.
                query = self.events(parsed_args) | {"after": now.removeprefix("id: ") or None}
                lines = self.connection.stream(_EVENTS, query)
                has_changed = any(line.startswith("data: ") for line in lines)
                time.sleep(_TOGETHER_S if has_changed else _AGAIN_S)
            except (BackendUnavailable, OperationTimeout) as failed:
                if not printed:
                    raise
                if not is_away:
                    self.app.LOG.warning("%s; waiting for it", failed.detail)
                is_away = True
                time.sleep(_AGAIN_S)

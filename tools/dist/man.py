"""Write man pages and bash's completion, from the commands' own help: ``python -m tools.dist.man ROOT``.

Below ROOT/usr/share: netplugin(1), netplugin.conf(5), netplugin-agent(8), and bash-completion/completions.
"""

from __future__ import annotations

import os
import re
import sys
import textwrap
import time
from argparse import SUPPRESS, ArgumentParser
from collections.abc import Iterable, Iterator, Mapping
from contextlib import redirect_stdout
from importlib.metadata import version
from io import StringIO
from pathlib import Path

from agents.main import parser as agent_parser
from netplugin import docgen
from netplugin.cli.main import Netplugin
from netplugin.cli.main import main as run_command

#: The groups of a command's own arguments; others are those of cliff's output, the same in each command.
_OWN = ("positional arguments", "options")
_CONF = """\
.SH DESCRIPTION
/etc/netplugin/netplugin.conf has sections, and lines of the form option = value. A list is a,b and a dict
key:value,key:value. \\fBnetplugin init\\fR writes the first options.
"""


def parsers() -> dict[str, ArgumentParser]:
    """The parsers of ``netplugin``: the command's by its name, that of all by an empty one."""
    app = Netplugin()
    app.close()
    commands = {name: entry.load()(app, None) for name, entry in sorted(app.command_manager)}
    return {"": app.parser} | {name: each.get_parser(f"netplugin {name}") for name, each in commands.items()}


def roff(text: str | None) -> str:
    """A text as roff has it, with what is in backticks in bold."""
    words = " ".join((text or "").split())  # argparse wraps by the width of the terminal
    text = "\n".join(textwrap.wrap(words, 75, break_long_words=False, break_on_hyphens=False))
    text = re.sub(r"^([.'])", r"\\&\1", text.replace("\\", "\\e").replace("-", "\\-"), flags=re.MULTILINE)
    return re.sub(r"`([^`]+)`", r"\\fB\1\\fR", text)


def page(name: str, section: int, summary: str, body: Iterable[str]) -> str:
    day = time.strftime("%Y-%m-%d", time.gmtime(int(os.environ.get("SOURCE_DATE_EPOCH") or time.time())))
    head = f'.TH {name.upper()} {section} {day} "netplugin {version("netplugin")}"'
    return f"{head}\n.SH NAME\n{name} \\- {summary}\n" + "".join(body)


def items(parser: ArgumentParser, own: bool) -> Iterator[str]:
    """The arguments of the command itself, or those of its output."""
    formatter = parser._get_formatter()
    for group in parser._action_groups:
        for action in group._group_actions if (group.title in _OWN) is own else ():
            if action.help != SUPPRESS and action.dest != "help":
                called, words = formatter._format_action_invocation(action), formatter._expand_help(action)
                yield f".TP\n\\fB{roff(called)}\\fR\n{roff(words)}\n"


def about(parser: ArgumentParser) -> Iterator[str]:
    yield f".SH SYNOPSIS\n{roff(parser.format_usage().removeprefix('usage: '))}\n"
    yield f".SH DESCRIPTION\n{roff(parser.description)}\n.SH OPTIONS\n"
    yield from items(parser, own=True)


def client(commands: Mapping[str, ArgumentParser]) -> Iterator[str]:
    yield from (*about(commands[""]), ".SH COMMANDS\n")
    output: dict[str, None] = {}
    for name, parser in commands.items():
        if name:
            yield f".SS netplugin {roff(name)}\n{roff(parser.description)}\n"
            yield from items(parser, own=True)
            output |= dict.fromkeys(items(parser, own=False))
    yield from (".SH OUTPUT\nCommands that print an object or a list have some of these options.\n", *output)
    yield ".SH EXIT STATUS\n0: success. 1: failure, with an error on standard error. 2: wrong command line.\n"


def options() -> Iterator[str]:
    yield _CONF
    for group, found in docgen._options().items():
        yield f".SH [{group}]\n"
        for option in sorted(found, key=lambda option: str(option.dest)):
            default = docgen._default(option)
            kind = docgen._type(option) + (f"; default: {default}" if default else "")
            yield f".TP\n\\fB{option.dest}\\fR ({roff(kind)})\n{roff(option.help)}\n"


def completion() -> str:
    """That of cliff, without names of three words, which it takes for one of two."""
    with redirect_stdout(StringIO()) as printed:
        run_command(["complete"])
    return re.sub(r" [a-z]+_[a-z_]+(?=[ '])", "", printed.getvalue())


def main() -> None:
    share, commands, agent = Path(sys.argv[1], "usr/share"), parsers(), agent_parser()
    files = {
        "man/man1/netplugin.1": page("netplugin", 1, "plug NICs into virtual machines", client(commands)),
        "man/man5/netplugin.conf.5": page("netplugin.conf", 5, "options of the netplugin agent", options()),
        "man/man8/netplugin-agent.8": page("netplugin-agent", 8, "give VMs their NICs", about(agent)),
        "bash-completion/completions/netplugin": completion(),
    }
    for name, text in files.items():
        (share / name).parent.mkdir(parents=True, exist_ok=True)
        (share / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

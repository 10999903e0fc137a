"""Generate the files that come from code: etc/netplugin.conf and the references of options and
errors.

``python -m netplugin.docgen`` writes the files; ``--check`` fails if one is out of date.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import EntryPoint, distribution
from io import StringIO
from pathlib import Path
from typing import Any

from oslo_config import cfg, generator

from netplugin.errors import ALL

_GROUP = "oslo.config.opts"
_COMMAND = "python -m netplugin.docgen"

#: What the caller can do about each error code. The tests fail if a code has no entry.
_WHAT_TO_DO = {
    "invalid_request": "Correct the fields that `errors` names and send it again.",
    "unauthorized": "Send a token of the file `[api] token_file`.",
    "forbidden": "Ask the operator to allow it: a callback URL by `[tasks] callback_allow`, a call by a "
    "credential with the role that `detail` names.",
    "not_found": "Look at the name; `GET /v1/ports` lists what there is.",
    "conflict": "Delete the port and ask for it again, or remove what is in the way: see `fix`.",
    "unsupported": "Ask without the feature, or use a backend that has it.",
    "backend_unavailable": "Do what `fix` says, then send it again. `GET /v1/backends` tells when "
    "the backend is usable.",
    "overloaded": "Wait for the seconds in `Retry-After` and send it again.",
    "capacity_exhausted": "Delete ports that are not needed, or give the host more of what "
    "`detail` names.",
    "host_error": "Read `detail` and the log of the daemon that refused; put it right and send it "
    "again.",
    "timeout": "`GET` the port to see where it stands, and send the request again.",
}

_OPTIONS_HEAD = f"""# Options

Written by `{_COMMAND}`. As a file to start from: [etc/netplugin.conf](../etc/netplugin.conf).
A list is written `a,b`, a dict `key:value,key:value`. An option without a default is unset.
"""

_ERRORS_HEAD = f"""# Errors

Written by `{_COMMAND}`. Every error is `application/problem+json` (RFC 9457) with the fields
`type` (`urn:netplugin:error:<code>`), `title`, `status`, `detail`, `code`, `step` (what was being
done), `retryable`, `port_id`, `fix` and `errors` (`[{{"field","message"}}]`). A request that fails
leaves nothing behind that was not there before. *Retryable*: the same request may succeed later
with nothing changed by the caller.
"""


def sample_config() -> str:
    """All options, commented out, with their defaults, in the format of oslo-config-generator."""
    conf = cfg.ConfigOpts()
    generator.register_cli_opts(conf)
    namespaces = [argument for e in _namespaces() for argument in ("--namespace", e.name)]
    # Read no configuration files: the output must not depend on /etc of this machine.
    conf([*namespaces, "--wrap-width", "90"], default_config_files=[], default_config_dirs=[])
    out = StringIO()
    generator.generate(conf, out)
    return f"# The options of netplugin. Written by {_COMMAND}.\n\n{out.getvalue()}"


def options_reference() -> str:
    parts = [_OPTIONS_HEAD]
    for group, options in _options().items():
        rows = (
            (f"`{o.dest}`", _type(o), _default(o), str(o.help))
            for o in sorted(options, key=lambda o: str(o.dest))
        )
        parts.append(f"\n## [{group}]\n\n{_table(('Option', 'Type', 'Default', 'Meaning'), rows)}")
    return "".join(parts)


def errors_reference() -> str:
    rows = (
        (
            f"`{e.code}`", str(e.status), "yes" if e.retryable else "no", e.meaning,
            _WHAT_TO_DO[e.code],
        )
        for e in ALL
    )  # fmt: skip
    columns = ("Code", "HTTP status", "Retryable", "Meaning", "What to do")
    return f"{_ERRORS_HEAD}\n{_table(columns, rows)}"


FILES: dict[str, Callable[[], str]] = {
    "etc/netplugin.conf": sample_config,
    "docs/reference-options.md": options_reference,
    "docs/reference-errors.md": errors_reference,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=_COMMAND, description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing, fail if a file is out of date"
    )
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1],
                        help="the source tree; default: the one of this module")  # fmt: skip
    arguments = parser.parse_args(argv)
    stale = [name for name, make in FILES.items() if not _same(arguments.root / name, make())]
    if arguments.check:
        for name in stale:
            print(f"{name} is not what the code says: run {_COMMAND}", file=sys.stderr)
        return 1 if stale else 0
    for name in stale:
        path = arguments.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(FILES[name](), encoding="utf-8")
        print(f"wrote {name}")
    return 0


def _same(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


def _namespaces() -> list[EntryPoint]:
    """The option lists of this distribution by entry point: this package must not import the backends."""
    found = distribution("netplugin").entry_points.select(group=_GROUP)
    return sorted(set(found), key=lambda entry: entry.name)


def _options() -> dict[str, list[Any]]:
    groups: dict[str, list[Any]] = {}
    for entry in _namespaces():
        for group, options in entry.load()():
            groups.setdefault(group, []).extend(options)
    return {"DEFAULT": groups.pop("DEFAULT", []), **dict(sorted(groups.items()))}


def _type(option: Any) -> str:
    kind = option.type
    name = str(kind.type_name).removesuffix(" value")
    choices = getattr(kind, "choices", None)
    if choices:
        return "one of " + ", ".join(f"`{choice}`" for choice in choices)
    least, most = getattr(kind, "min", None), getattr(kind, "max", None)
    if most is not None:
        return f"{name}, {0 if least is None else least} to {most}"
    return name if least is None else f"{name}, at least {least}"


def _default(option: Any) -> str:
    if option.default is None:
        return ""
    shown = " ".join(option.type.format_defaults(option.default, option.sample_default))
    return f"`{shown}`" if shown else "empty"


def _table(columns: Sequence[str], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    return "".join(f"| {' | '.join(map(_cell, line))} |\n" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")


if __name__ == "__main__":
    sys.exit(main())

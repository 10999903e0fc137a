"""How fast ports are plugged, beside other ways, in one run; kept as JSON and compared with another run.

    python -m tests.lab.sandbox --guests --hugepages 200 -- python -m tests.bench [--quick]

Without a sandbox it shows a run that was kept: ``--show FILE``, with ``--compare`` beside another one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.bench import names, tables
from tests.bench.comparison import compare, doubts
from tests.bench.sizes import FORMS, FULL, QUICK
from tests.bench.values import Run, Unreadable, read, write

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build/bench"
PAGE = ROOT / "docs/performance.md"
#: What ``--write-docs`` replaces is between these lines of the page.
BEGIN, END = "<!-- figures of a run: begin -->", "<!-- figures of a run: end -->"
_LAST = "last"
_PICTURE = "Latency of one port over the ports that are there, and of an open loop over its rate."


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    try:
        old = _old(options)
        if options.show:
            run = read(options.show)
        else:
            run = _measured(options)
    except Unreadable as wrong:
        print(f"tests.bench: {wrong}", file=sys.stderr)
        return 2
    print(tables.markdown(run))
    if old is not None:
        print(_compared(old, run))
    if options.write_docs:
        picture = PAGE.with_suffix(".svg")
        _draw(run, picture)
        write_docs(PAGE, f"{tables.markdown(run)}\n![{_PICTURE}]({picture.name})\n")
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__.splitlines()[0])
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--form", choices=sorted(FORMS), default=FULL.form)
    form.add_argument("--quick", action="store_const", const=QUICK.form, dest="form", help="fewer samples")
    parser.add_argument(
        "--only", action="append", choices=names.ALL, metavar="WORKLOAD", help=", ".join(names.ALL)
    )
    parser.add_argument(
        "--compare",
        nargs="?",
        type=Path,
        const=Path(_LAST),
        metavar="FILE",
        help="with this run, or the last one of the same form",
    )
    parser.add_argument("--show", type=Path, metavar="FILE", help="measure nothing: show this run")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where runs are kept")
    parser.add_argument(
        "--write-docs", action="store_true", help="put tables and picture into docs/performance.md"
    )
    # os-vif brings eventlet, which the ovs package would then use in the agent too.
    parser.add_argument(
        "--peers",
        type=Path,
        action="append",
        default=[],
        metavar="DIRECTORY",
        help="has os-vif, which brings ovsdbapp",
    )
    parser.add_argument(
        "--peers-linuxbridge",
        type=Path,
        action="append",
        default=[],
        metavar="DIRECTORY",
        help="has an os-vif with the plug-in for Linux bridges (below 5), searched before --peers",
    )
    return parser.parse_args(argv)


def _old(options: argparse.Namespace) -> Run | None:
    """Read the run to compare with, before a new one is kept beside it. Raises: Unreadable."""
    if options.compare is None:
        return None
    if options.compare != Path(_LAST):
        return read(options.compare)
    form = read(options.show).form if options.show else options.form
    there = [path for path in sorted(options.folder.glob(f"*-{form}.json")) if path != options.show]
    if not there:
        raise Unreadable(f"{options.folder} has no run of the form {form} to compare with")
    return read(there[-1])


def _measured(options: argparse.Namespace) -> Run:
    # What only measuring needs (libvirt) is imported by it.
    from tests.bench.run import Bench

    paths, bridge_paths = options.peers, options.peers_linuxbridge
    run = Bench(
        FORMS[options.form],
        options.only or names.ALL,
        paths,
        [*bridge_paths, *paths] if bridge_paths else [],
    ).run()
    kept = options.folder / f"{run.started[:19].replace(':', '')}-{run.form}.json"
    write(run, kept)
    kept.with_suffix(".md").write_text(tables.markdown(run))
    print(f"kept in {kept}", file=sys.stderr)
    _draw(run, kept.with_suffix(".svg"))
    return run


def _draw(run: Run, path: Path) -> None:
    try:
        from tests.bench.picture import draw
    except ImportError:
        print("no picture: matplotlib is not installed", file=sys.stderr)
        return
    draw(run, path)


def _compared(old: Run, new: Run) -> str:
    rows = compare(old, new)
    lines = [f"### {old.revision} ({old.started}), then {new.revision} ({new.started})"]
    lines += [f"- {doubt}" for doubt in doubts(old, new)]
    return "\n".join([*lines, "", tables.comparison_table(rows)])


def write_docs(page: Path, text: str) -> None:
    """Replace what is between the two marks. Raises: Unreadable if the page has them not."""
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise Unreadable(f"{page} has no lines {BEGIN} and {END}")
    page.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}")


if __name__ == "__main__":
    sys.exit(main())

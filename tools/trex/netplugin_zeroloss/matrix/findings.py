"""Findings: what was found before a run and, if it is wrong, what mends it; and those about generators."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from netplugin.api.errors import NetpluginError
from netplugin_zeroloss.generators import choose as generators
from netplugin_zeroloss.journal import Cell
from netplugin_zeroloss.machines import SshMachine
from netplugin_zeroloss.values import MIXES, GeneratorError, UnusableInput


@dataclass(frozen=True, slots=True)
class Finding:
    """``part``: what was checked, in one word. ``fix`` None: it is as it must be."""

    part: str
    found: str
    fix: str | None = None

    @property
    def missing(self) -> bool:
        return self.fix is not None


def of_error(part: str, error: NetpluginError, fix: str) -> Finding:
    """Return a finding with the fix of the error, or else with this one."""
    return Finding(part, error.detail, error.fix or fix)


def require(findings: Iterable[Finding]) -> None:
    """Refuse the run for all findings that have a fix, in one list.

    Raises: UnusableInput.
    """
    missing = list(dict.fromkeys(finding for finding in findings if finding.missing))
    if missing:
        count = f"{len(missing)} finding{'s' if len(missing) > 1 else ''}, and nothing was sent"
        lines = (f"{each.part}: {each.found}\n  fix: {each.fix}" for each in missing)
        raise UnusableInput(count, "\n" + "\n".join(lines))


_GENERATORS = {
    "trex-stl": "start TRex there (t-rex-64 -i), or name trex_dir and trex_cfg; docs/zeroloss/generators.md",
    "trex-stf": "unpack TRex in trex_dir; docs/zeroloss/generators.md",
    "tcpreplay": "apt-get install tcpreplay; name interfaces that are there and up (ip link)",
    "exec": "run the command by hand, and give it a line: docs/zeroloss/generators.md",
    "sim": "netplugin-zeroloss evaluate --help lists the devices",
}


def about_generators(chosen: Iterable[tuple[generators.Description, Cell]]) -> Iterator[Finding]:
    """Start and stop each distinct generator, and yield why it cannot be used, or not for some cells."""
    for description, cells in _cells_of(chosen):
        refused: dict[str, None] = {}
        try:
            with generators.make(description) as made:
                for cell in cells:
                    try:
                        made.info.check_burst(cell.burst, cell.frame if cell.frame in MIXES else "")
                    except UnusableInput as error:
                        refused[str(error)] = None
        except (UnusableInput, GeneratorError) as error:
            fix = _GENERATORS[description.type]
            if isinstance(description, generators.TrexStf) and isinstance(description.machine, SshMachine):
                yield from about_ssh(description.machine)
                fix = f"{description.machine.fix(str(error))}; {fix}"
            yield Finding("generator", str(error), fix)
        fix = "take trex-stl without a profile, or exclude these cells: exclude: [{burst: N, frame: ..}]"
        yield from (Finding("generator", found, fix) for found in sorted(refused))


def _cells_of(
    chosen: Iterable[tuple[generators.Description, Cell]],
) -> list[tuple[generators.Description, list[Cell]]]:
    """Return each distinct generator with the cells that use it; the seed of a simulation does not matter."""
    found: list[tuple[generators.Description, list[Cell]]] = []
    for description, cell in chosen:
        alike = description
        if isinstance(alike, generators.Sim):
            alike = alike.model_copy(update={"seed": ""})
        mine = [cells for known, cells in found if known == alike]
        if not mine:
            mine = [[]]
            found.append((alike, mine[0]))
        mine[0].append(cell)
    return found


def about_program(program: str, package: str, part: str) -> Finding:
    """Return whether a program of a Debian package is installed."""
    if there := shutil.which(program):
        return Finding(part, f"{program} is {there}")
    return Finding(part, f"{program} is not installed here, or not in PATH", f"apt-get install {package}")


def about_ssh(machine: SshMachine, image: Path | None = None) -> Iterator[Finding]:
    yield about_program("ssh", "openssh-client", "ssh")
    for name in filter(None, (machine.key, machine.known_hosts)):
        path = Path(name)
        if path.parent == image and not path.parent.exists():
            continue  # that it is missing is a finding of the image
        try:
            path.open("rb").close()
            if name == machine.key and path.stat().st_mode & 0o077:
                found = f"others may read the key {name}, so ssh refuses it"
                yield Finding("ssh", found, f"chmod 600 {name}")
        except OSError as error:
            fix = f"ssh-keygen -t ed25519 -N '' -f {name}, and ssh-copy-id -i {name}.pub {machine.user}@VM"
            if name != machine.key:
                fix = f"ssh-keyscan -p {machine.port} {machine.host} >> {name}"
            yield Finding("ssh", f"{name}: {error.strerror}", fix)

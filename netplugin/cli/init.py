"""The command ``netplugin init``: the first options of a host, and what its first port still needs."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import shutil
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

from netplugin.api.errors import HostError, InvalidRequest, NetpluginError, reason
from netplugin.api.physical_models import PhysicalNetworkSpec
from netplugin.cli import init_plan, show
from netplugin.cli.host_tuning import ovs_sockets
from netplugin.host.links import Links
from netplugin.host.processes import run
from netplugin.host.safe_files import open_own, own_directory, replacing, require_own_directory
from netplugin.host.uplink_devices import device_findings
from netplugin.spelling import did_you_mean
from netplugin.tuning.checks import check
from netplugin.tuning.checks.scene import Scene
from netplugin.tuning.facts import Live, NetworkFacts
from netplugin.tuning.read import read_facts
from netplugin.tuning.read.network import routed
from netplugin.tuning.read_live import read_ovs
from netplugin.tuning.root import Root
from netplugin.tuning.steps import needed

_CONFIG = Path("/etc/netplugin/netplugin.conf")
_NAMES = ("backend", "physical_network", "bridge", "uplink", "vf_device")
_FIRST = "netplugin port put nic1 --vm-id vm1 --mac 52:54:00:12:34:56"


class Init(show.Command):
    """Write the first options of a host, and list what is missing.

    Asks on a terminal if no backend is given. Starts nothing; other lines of the file stay.
    """

    def add_options(self, parser: ArgumentParser) -> None:
        parser.add_argument("--physical-network", metavar="NAME", help="physical network, such as physnet1")
        parser.add_argument("--bridge", metavar="NAME", help="its OVS bridge; default: br-<network>")
        for flag, metavar, words in (
            ("--backend", "NAME", "backend to enable"),
            ("--uplink", "DEVICE", "NIC of the network: a PCI address for OVS-DPDK, an interface otherwise"),
            ("--vf-device", "DEVICE", "NIC whose virtual functions are for VMs (sriov, vdpa)"),
        ):
            words = f"{words}; may be given several times"
            parser.add_argument(flag, metavar=metavar, action="append", default=[], help=words)
        words = "also an uplink that carries the default route or an SSH session"
        parser.add_argument("--allow-in-use", action="store_true", help=words)
        words = f"file to write; default: {_CONFIG}"
        parser.add_argument("--config-file", type=Path, default=_CONFIG, metavar="FILE", help=words)
        parser.add_argument("--dry-run", action="store_true", help="print the change and write nothing")

    def take_action(self, parsed_args: Namespace) -> None:
        installed = sorted(entry_points(group="netplugin.backends").names)
        if asks := not parsed_args.backend and sys.stdin.isatty():
            _ask(parsed_args, installed)
        for flag in ("backend", "physical_network"):
            if not getattr(parsed_args, flag):
                raise init_plan.refused(show.option_of(flag), "is required without a terminal", "give it")
        for name in sorted({*parsed_args.backend} - {*installed}):
            fix = f"choose from {', '.join(installed)}"
            raise init_plan.refused("--backend", f"there is no {name}{did_you_mean(name, installed)}", fix)
        backends, network, *rest = (getattr(parsed_args, name) for name in _NAMES)
        spec = init_plan.spec_of(backends, network, *rest)
        path, write = parsed_args.config_file.resolve(), self.app.stdout.write
        with _refusals(path):
            text, mode, owner = _read(path, os.O_RDONLY if parsed_args.dry_run else os.O_RDWR)
        new = init_plan.edited(text, init_plan.settings(backends, network, spec))
        self.say("netplugin: checking the options and the host ...")
        with tempfile.NamedTemporaryFile(suffix=".conf") as draft:
            draft.write(new.encode())
            draft.flush()
            missing = list(_missing(network, spec, parsed_args.allow_in_use, path, Path(draft.name)))
        unit = _unit()
        if unit != "active":
            command = "systemctl enable --now netplugin-agent"
            command = command if unit else f"netplugin-agent --config-file {path}"
            missing.append(("the agent does not run", [command]))
        elif new != text:
            missing.append(("the agent runs with the old options", ["systemctl restart netplugin-agent"]))
        change = difflib.unified_diff(text.splitlines(True), new.splitlines(True), str(path), f"{path} (new)")
        write("".join(change))
        if new == text:
            write(f"{path} has these options already.\n")
        elif parsed_args.dry_run or (asks and not _answer("Write it? (yes or no)", "yes").startswith("y")):
            write("Nothing was written.\n")
        else:
            with _refusals(path):
                own_directory(path.parent, 0o755)
                with replacing(path, mode, owner) as file:
                    file.write(new.encode())
            write(f"Wrote {path}.\n")
        for number, (what, commands) in enumerate(missing, 1):
            write("".join((f"\nMissing {number}: {what}\n", *(f"   {command}\n" for command in commands))))
        where = f"--backend {backends[0]} --physical-network {network}"
        write(f"\nThen the first port:\n   netplugin backend list\n   {_FIRST} {where}\n")


def _ask(options: Namespace, installed: list[str]) -> None:
    """Fill in what was not given, by answers on the terminal."""
    options.backend = _answer(f"Backends ({', '.join(installed)})", "linuxbridge").replace(",", " ").split()
    options.physical_network = options.physical_network or _answer("Physical network", "physnet1")
    words = "Its uplink: PCI address (OVS-DPDK) or interface; empty for none"
    options.uplink = options.uplink or _answer(words).split()
    if "sriov" in options.backend and not options.vf_device:
        options.vf_device = _answer("NIC whose virtual functions are for VMs").split()


def _answer(question: str, default: str = "") -> str:
    print(f"{question} [{default}]: " if default else f"{question}: ", end="", file=sys.stderr, flush=True)
    if not (line := sys.stdin.readline()):
        raise InvalidRequest("there was no answer, and nothing was changed", step="init")
    return line.strip() or default


@contextlib.contextmanager
def _refusals(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeDecodeError) as wrong:
        raise InvalidRequest.of_field("--config-file", f"{path}: {reason(wrong)}", step="init") from None


def _read(path: Path, flags: int) -> tuple[str, int, tuple[int, int] | None]:
    """The file, its mode and its owner; nobody else may be able to write to it. Raises: OSError."""
    if path.parent.exists():
        require_own_directory(path.parent)
    try:
        descriptor = open_own(path, flags)
    except FileNotFoundError:
        return "", 0o600, None
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        return file.read().decode(), found.st_mode & 0o7777, (found.st_uid, found.st_gid)


def _missing(
    network: str, spec: PhysicalNetworkSpec, allowed: bool, path: Path, draft: Path
) -> Iterator[init_plan.Step]:
    """Raises: InvalidRequest for mistakes in the new file, or for an uplink in use."""
    facts = read_facts(Root())
    if not allowed:
        init_plan.check_free(spec, _used(facts.network))
    _check(path, draft)
    live = Live(ovs=read_ovs(ovs_sockets(Namespace(ovs_rundir=None, config_file=[draft]))))
    failed = [finding for finding in check(Scene(facts, live)) if finding.status == "fail"]
    for finding in (*failed, *device_findings(network, spec)):
        yield finding.found, [finding.fix or ""]
    debian = Path("/etc/debian_version").exists()
    program = init_plan.OVS_DPDK if debian else "ovs-vswitchd"
    yield from init_plan.missing(spec, facts, live, debian, shutil.which(program) is not None)


def _check(path: Path, draft: Path) -> None:
    """Have the agent check the new file. Raises: InvalidRequest with its mistakes."""
    program = [sys.executable, "-P", "-m", "agents.main", "--check", str(draft)]
    try:
        run(program, step="init", deadline=time.monotonic() + 60)
    except HostError as wrong:
        text = wrong.detail.partition("netplugin-agent: ")[2] or wrong.detail
        text = text.replace("\nnetplugin-agent:", ";").replace(str(draft), str(path))
        raise InvalidRequest(f"{path} would not be valid: {text}", step="init", fix="correct it") from None


def _used(network: NetworkFacts) -> set[str]:
    """Interfaces of default routes and of the SSH session of this process, those below them, their NICs."""
    mine, pid = set[str](), os.getpid()
    while pid > 0:  # sudo takes the variable away: those that started it have it
        with contextlib.suppress(OSError):
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            if found := re.search(rb"(?:^|\0)SSH_CONNECTION=\S+ \S+ ([^ %]+)", environment):
                mine.add(found[1].decode(errors="replace"))
        pid = int(needed(Root().text(f"/proc/{pid}/stat")).rpartition(")")[2].split()[1])
    addresses = Links().addresses().items()
    also = [name for name, its in addresses if mine & {address.partition("/")[0] for address in its}]
    names = needed(routed(Root(), also))
    return {*names, *(nic.address for nic in needed(network.nics) if names & {*nic.interfaces})}


def _unit() -> str | None:
    """The state of the agent's unit, such as ``active``; None if it is not there."""
    shown = ["systemctl", "show", "--property=LoadState,ActiveState", "netplugin-agent"]
    try:
        text = run(shown, step="init", deadline=time.monotonic() + 5)
    except NetpluginError:
        return None
    found = re.search(r"^ActiveState=(.+)$", text, re.MULTILINE)
    return found[1] if found and "LoadState=loaded" in text else None

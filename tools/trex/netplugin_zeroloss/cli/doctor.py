"""The sub-command ``doctor``: says what is missing on this host for a run, and what mends it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

from netplugin.api.client import Client
from netplugin.api.errors import NetpluginError
from netplugin.calls import as_commands
from netplugin.data_path import installed
from netplugin.tuning.read import read_facts
from netplugin.tuning.root import Root
from netplugin_zeroloss.matrix import cells, checks
from netplugin_zeroloss.matrix.agent_bench import AgentBench
from netplugin_zeroloss.matrix.bench import generator_of
from netplugin_zeroloss.matrix.description import RunDescription, read
from netplugin_zeroloss.matrix.domain import about_image
from netplugin_zeroloss.matrix.findings import Finding, about_generators, about_program, of_error
from netplugin_zeroloss.matrix.host import client
from netplugin_zeroloss.matrix.yaml_model import read_text
from netplugin_zeroloss.values import UnusableInput
from netplugin_zeroloss.vm.commands import programs
from netplugin_zeroloss.vm.image import FOLDER, LATEST
from netplugin_zeroloss.vm.spec import VmSpec

_MISSING = 1
#: Numbers of PMD cores in the table.
_PMD_CORES = (2, 4, 6, 8)
#: Programs that every run needs, with their Debian packages.
_PROGRAMS = (
    *(("ovs-appctl", "openvswitch-switch-dpdk"), ("virsh", "libvirt-clients")),
    *(("dpdk-testpmd", "dpdk-dev"), ("ssh", "openssh-client")),
)
_TREX = "unpack https://trex-tgn.cisco.com/trex/release/latest, and name it: trex_dir in the description"


def doctor(options: argparse.Namespace) -> int:
    """Print each finding with its fix. Returns the exit status."""
    file: Path | None = options.file
    missing = 0
    for finding in examine(file):
        state = "missing" if finding.missing else "ok"
        print(f"{state:8} {finding.part:10} {finding.found}")
        if finding.missing:
            print(f"{'':19} fix: {as_commands(finding.fix or '')}")
            missing += 1
        sys.stdout.flush()
    if missing:
        print(f"\n{missing} missing")
        return _MISSING
    following = f"netplugin-zeroloss matrix {file} --dry-run, which looks into the VM too; or prove {file}"
    if file is None:
        following = "cp tools/trex/matrix.yaml mine.yaml, fill it in, and netplugin-zeroloss doctor mine.yaml"
    print(f"\nNothing is missing. Next: {following}")
    return 0


def examine(file: Path | None) -> Iterator[Finding]:
    """Yield the findings for a run description, or without one those that every table needs, each once.

    Nothing is changed and no VM is started. Raises: UnusableInput if the description is not valid.
    """
    found = _of_run(read(read_text(file), str(file))) if file is not None else _of_host()
    yield from dict.fromkeys(found)


def _of_run(description: RunDescription) -> Iterator[Finding]:
    tasks = cells.tasks(description)
    if description.agent is None:
        yield from about_generators((generator_of(description, task), task.cell) for task in tasks)
        return
    try:
        bench = AgentBench(description, run_id="doctor", pmd_cpus=None)
    except UnusableInput as error:
        yield Finding("agent", str(error), "mend `agent` in the description")
        return
    with closing(bench):
        yield from bench.findings(tasks)
    with client(description) as agent:
        yield from _failed(agent)


def _of_host() -> Iterator[Finding]:
    for program, package in _PROGRAMS:
        yield about_program(program, package, "program")
    image = list(about_image(FOLDER / LATEST))
    yield from image
    for program, package in programs(VmSpec()) if any(each.missing for each in image) else ():
        yield about_program(program, package, "program")
    yield checks.about_vpp_papi()
    if find_spec("trex") is None:
        yield Finding("trex", "TRex's Python client is not installed", _TREX)
    yield from checks.about_pmd_cores(_PMD_CORES, read_facts(Root()), ())
    try:
        agent = Client.from_environment()
    except NetpluginError as error:
        yield of_error("agent", error, "mend NETPLUGIN_URL")
        return
    with agent:
        answers = list(checks.about_agent(agent))
        yield from answers
        if any(finding.missing for finding in answers):
            return
        try:
            yield from _backends(agent)
            yield checks.about_plan(agent.checks())
        except NetpluginError as error:
            yield of_error("agent", error, "the agent's log")
        yield from _failed(agent)


def _backends(agent: Client) -> Iterator[Finding]:
    """Yield which of the installed backends can be used, and whether there are networks for two ends.

    Raises: NetpluginError.
    """
    infos = {info.name: info for info in agent.backends()}
    for name in sorted(installed().names):
        info = infos.get(name)
        if info is None:
            yield Finding("backend", f"the agent has no {name}", checks.enable(name))
        elif not info.usable:
            yield Finding("backend", f"{name}: {info.reason}", info.fix or "netplugin backend list")
        else:
            yield Finding("backend", f"{name} is usable, with {info.features.max_queues} queues at most")
    networks = agent.list_physical_networks()
    names = ", ".join(network.name for network in networks) or "none"
    few = "netplugin physical-network put NAME, for each of the two NICs" if len(networks) < 2 else None
    yield Finding("network", f"the agent has the physical networks {names}", few)
    for network in networks:
        for wrong in network.findings:
            yield Finding("nic", wrong.found, wrong.fix or "netplugin physical-network show")


def _failed(agent: Client) -> Iterator[Finding]:
    """Yield the checks of the host that failed, as the agent has them."""
    try:
        yield from (checks.of_check(each) for each in agent.checks() if each.status == "fail")
    except NetpluginError as error:
        yield of_error("host", error, "netplugin host check")

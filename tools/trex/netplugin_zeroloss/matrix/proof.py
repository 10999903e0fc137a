"""Carries out ``prove``: what NICs show of their VFs, of an uplink and of a cell, each step undone.

The folder has the state before, so that a proof that was killed is compared with it when it is repeated, the
run of each backend with its journal, and at the end the report.
"""

from __future__ import annotations

import io
import json
import platform
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from pydantic import TypeAdapter

from netplugin.api.client import Client
from netplugin.api.errors import BackendUnavailable, Conflict, NetpluginError, Unsupported
from netplugin.api.physical_models import PARTS
from netplugin.data_path import NoDataPath, data_paths, uplink_parts
from netplugin.host.locks import Locks
from netplugin.host.ovs_sockets import OvsSockets
from netplugin.host.safe_files import read_own, replacing
from netplugin.host.vfs import SYS
from netplugin.programs import bounded
from netplugin.programs.polling import polled
from netplugin.tuning.facts import OvsLive
from netplugin.tuning.read_live import URI, read_live, read_ovs
from netplugin.tuning.root import known
from netplugin_zeroloss.journal import CellRecord, now, read_past, read_run
from netplugin_zeroloss.matrix import cells, session
from netplugin_zeroloss.matrix.agent_bench import AgentBench
from netplugin_zeroloss.matrix.description import Controls, RunDescription
from netplugin_zeroloss.matrix.host import client
from netplugin_zeroloss.matrix.nics import address_of, devices_of
from netplugin_zeroloss.matrix.ports import is_active
from netplugin_zeroloss.matrix.proof_host import LOOK_S, ProofHost, remaining
from netplugin_zeroloss.matrix.proof_ledger import (
    BACKEND,
    RUN_ID,
    VM_ID,
    Failed,
    NotShown,
    VfLedger,
    lacking,
    port_of,
    remove,
    usable,
)
from netplugin_zeroloss.report.proof import Outcome, Proof, ProofStep, public
from netplugin_zeroloss.report.words import rate
from netplugin_zeroloss.search.result import environment
from netplugin_zeroloss.search.trials import FAILURES
from netplugin_zeroloss.values import GeneratorError, UnusableInput

REPORT, _BEFORE = "proof.md", "before.json"
#: What the search of a cell has at most: seconds of the deciding trial, trials; and at least: relative width.
_TRIAL_S, _TRIALS, _WIDTH = 5.0, 12, 0.05
#: What it does without, and the axes of which it has the first value.
_PLAIN = {"preset": None, "goals": (), "warm_up": None, "repeats": 1, "soak_duration": 0}
_AXES = ("frames", "flows", "queues", "vnf_modes", "bursts", "numa")
_STATE: TypeAdapter[dict[str, str]] = TypeAdapter(dict[str, str])
#: Errors by which the host or the NIC lacks what a step needs.
_LACKS = (BackendUnavailable, Conflict, Unsupported, UnusableInput, GeneratorError)
#: Called with a line of progress.
Say = Callable[[str], None]


def prove(path: Path, folder: Path | None, say: Say, quiet: bool) -> tuple[Proof, Path]:
    """Carry out all steps; returns what is to be reported, and the folder for it.

    Raises: UnusableInput before anything is changed; KeyboardInterrupt, when all is undone.
    """
    run, _ = session.read_file(path)
    folder = folder or Path(f"{run.name}-proof")
    if run.agent is None or (folder / REPORT).exists():
        why = f"{folder} has a {REPORT}: take another --folder" if run.agent else "it has no agent"
        raise UnusableInput(str(path), why)
    with closing(Locks()) as locks, client(run) as agent:
        try:
            if (holder := locks.take(VM_ID)) is not None:
                raise UnusableInput("prove", f"{holder} has begun one on this host")
            return _Proving(run, folder, agent, say, quiet).carry_out(), folder
        except (NetpluginError, NoDataPath) as error:
            raise UnusableInput("agent", str(error)) from error


def write(path: Path, text: str) -> None:
    """Raises: UnusableInput."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, 0o644) as file:
            file.write(text.encode())
    except OSError as error:
        raise UnusableInput(str(path), error.strerror or str(error)) from error


def short(run: RunDescription, backend: str) -> RunDescription:
    """Return the run of one cell of a backend: a short search, and PMD threads as they are."""
    seconds, trials = min(run.search.final_duration, _TRIAL_S), min(run.search.max_trials, _TRIALS)
    least = {"final_duration": seconds, "max_trials": trials, "latency_duration": 0}
    fewer = {"fewer_queues": tuple({backend}.intersection(run.matrix.fewer_queues))}
    first = {name: getattr(run.matrix, name)[:1] for name in _AXES}
    axes = run.matrix.model_copy(update={**first, **fewer, "backends": (backend,), "without_pmd": (backend,)})
    width = max(run.search.precision, _WIDTH)
    search = run.search.model_copy(update={**_PLAIN, **least, "precision": width})
    return run.model_copy(update={"search": search, "matrix": axes, "exclude": (), "controls": Controls()})


def judged(record: CellRecord) -> str:
    """Return what a cell shows: frames pass. Raises: Failed."""
    result, setup = record.result, cast(Mapping[str, Any], record.setup)
    trials = result["trial_log"] if result is not None else ()
    passed = sum(trial["measured"]["rx_packets"] for trial in trials)
    if result is None or not passed or record.verdict in FAILURES:
        raise Failed(f"frames were to pass: {record.error if result is None else result['reason']}")
    pps, width = record.zero_loss_pps, result["goal"]["relative_width"]
    where = f"{setup['vnf']['name']} in {'a VM of the run' if 'vm' in setup else 'the place of the VM'}"
    by = f"{len(trials)} trials of {setup['generator']['type']}"
    found = f"{record.verdict}, {'no rate' if pps is None else rate(pps, width)}: {result['reason']}"
    return f"{passed} frames passed {where}; {cells.CellTask(record.cell, record.part)}, {by}; {found}"


class _Proving:
    """One proof. What shows a step raises NotShown, Failed, and what its calls raise."""

    def __init__(self, run: RunDescription, folder: Path, agent: Client, say: Say, quiet: bool) -> None:
        """Raises: NetpluginError."""
        self._run, self._folder, self._agent, self._say, self._quiet = run, folder, agent, say, quiet
        self._backends, self._ends, self._seconds = run.matrix.backends, run.ends or (), run.timeouts.active
        rundir = run.evidence.ovs_rundir
        self._sockets = OvsSockets.below(rundir) if rundir else OvsSockets()
        mine = {name for backend in (BACKEND, *self._backends) for name in self._names_of(backend)}
        self._networks = [network for network in agent.list_physical_networks() if network.name in mine]
        self._devices = [device for network in self._networks for device in devices_of(network, PARTS)]
        nics = dict.fromkeys(address_of(device, SYS) for device in self._devices)
        self._host = ProofHost([nic for nic in nics if nic is not None])
        self._steps: list[ProofStep] = []

    def carry_out(self) -> Proof:
        self._begin()
        names, before = self._names(), self._before()
        ends = [end.network_of(BACKEND) for end in self._ends]
        try:
            for name, do in VfLedger(self._agent, self._host, ends, self._seconds).steps():
                self._step(f"{BACKEND}: {name}", do)
            for backend in self._backends:
                if any(path.ovs_bridge for path in data_paths(backend)):
                    self._step(f"{backend}: an uplink of OVS", partial(self._uplink, backend))
                self._step(f"{backend}: frames pass a cell", partial(self._cell, backend))
        except BaseException:
            remove(self._agent, VM_ID, self._seconds)
            (self._folder / _BEFORE).unlink(missing_ok=True)
            raise
        self._step("the host is as before", partial(self._undone, before))
        facts = map(self._host.facts, self._host.nics)
        nics = [{name: public(text, names) or "not reported" for name, text in nic.items()} for nic in facts]
        steps = [replace(step, found=public(step.found, names)) for step in self._steps]
        return Proof(now()[:10], self._software(), nics, steps)

    def _step(self, name: str, do: Callable[[], str]) -> None:
        self._say(f"{name} ...")
        begun = time.monotonic()
        try:
            outcome, found = Outcome.SHOWN, do()
        except (NotShown, *_LACKS) as why:
            outcome, found = Outcome.NOT_SHOWN, str(why)
        except (Failed, NetpluginError) as why:
            outcome, found = Outcome.FAILED, str(why)
        self._steps.append(ProofStep(name, outcome, found, round(time.monotonic() - begun, 1)))
        self._say(f"  {outcome}: {found}")

    def _names_of(self, backend: str) -> list[str]:
        """Return the physical network of each end that has one."""
        return [name for end in self._ends if (name := end.network_of(backend).physical_network)]

    # -- before and after ------------------------------------------------------------------------

    def _options(self, backend: str) -> session.RunOptions:
        folder = self._folder / backend
        own = (Path(f"{folder}.json"), folder, read_past(folder) is not None)
        return session.RunOptions(*own, self._quiet, tuple(sys.argv), RUN_ID)

    def _begin(self) -> None:
        """Remove what a killed proof left. Raises: UnusableInput if a backend needs VFs that others have."""
        with closing(AgentBench(self._run, RUN_ID, None)) as bench:
            bench.recover()
        remove(self._agent, VM_ID, self._seconds)
        for options in map(self._options, self._backends):
            if options.resume:
                session.recover(options)
        for info in self._agent.backends():
            if info.name in self._backends and info.usable and info.features.virtual_functions:
                why, used = lacking(self._agent, self._names_of(info.name))
                if used:
                    raise UnusableInput(info.name, f"{why}: it needs VFs in use, so nothing was changed")

    def _before(self) -> dict[str, str]:
        """Return the state before, of a proof that was killed: as it found it. Raises: UnusableInput."""
        path = self._folder / _BEFORE
        with suppress(FileNotFoundError, bounded.Unreadable):
            return bounded.validated(bounded.parse(read_own(path)), _STATE)
        write(path, json.dumps(found := self._state_now()))
        return found

    def _undone(self, before: Mapping[str, str]) -> str:
        remove(self._agent, VM_ID, self._seconds)
        found = remaining(before, self._state_now, self._seconds)
        mine = tuple(f"port {end.port_id}:" for end in self._ends)
        others = [line for line in found if line.startswith("port ") and not line.startswith(mine)]
        rest = "; ".join(line for line in found if line not in others)
        if others:
            raise NotShown(f"others changed {len(others)} ports meanwhile; else: {rest or 'nothing'}")
        if rest:
            raise Failed(rest)
        return f"{len(before)} settings of NICs, VFs, links, OVS and ports are"

    def _ovs(self) -> OvsLive | None:
        return known(read_ovs(self._sockets), None)

    def _state_now(self) -> dict[str, str]:
        return self._host.state(self._agent, self._ovs())

    # -- an uplink, and a cell -------------------------------------------------------------------

    def _uplink(self, backend: str) -> str:
        """Read from OVS what a port of the first end is plugged to."""
        if "ovs" not in uplink_parts(backend, usable(self._agent, backend).features.virtual_functions):
            raise NotShown("its frames leave by VFs")
        plugged = port_of(0, backend, self._ends[0].network_of(backend))
        network = next((n for n in self._networks if n.name == plugged[1].network.physical_network), None)
        devices = network.ovs.devices if network is not None and network.ovs else ()
        if network is None or not devices:
            raise NotShown("the network of the first end has no uplink in OVS")
        try:
            port = polled(partial(self._agent.put_port, *plugged), is_active, self._seconds, LOOK_S)
            ovs = self._ovs()
        finally:
            remove(self._agent, VM_ID, self._seconds)
        if ovs is None:
            raise NotShown("OVS does not answer: is ovs_rundir of the description its directory?")
        links = [each.link for each in ovs.ports if (each.bridge, each.type) == (network.bridge, "dpdk")]
        if links.count(True) < len(devices) <= len(links):
            raise NotShown("an uplink has no carrier")
        if len(links) < len(devices) or not is_active(port):
            seen = f"{len(links)}, and the port {port.state} {port.error.detail if port.error else ''}"
            raise Failed(f"{len(devices)} uplinks in OVS and an active port requested, {seen} seen")
        return f"{len(devices)} in OVS with link, and a port on their bridge is active"

    def _cell(self, backend: str) -> str:
        usable(self._agent, backend)
        options = self._options(backend)
        write(options.description, short(self._run, backend).model_dump_json(exclude_unset=True))
        try:
            session.carry_out(options, io.StringIO())
        finally:
            remove(self._agent, VM_ID, self._seconds)
        return judged(read_run(self._folder / backend).records[-1])

    # -- the report ------------------------------------------------------------------------------

    def _software(self) -> dict[str, str]:
        here, live = environment("", (), ""), read_live(self._sockets, URI)
        ovs, kinds = known(live.ovs, None), ("a VM" if here["virtual"] else "no VM", here["machine"])
        found = {"netplugin": here["netplugin"], "kernel": here["kernel"], "host": ", ".join(kinds)}
        found |= {name: live.versions.get(name) for name in ("qemu", "libvirt")}
        found |= {"OVS": ovs and ovs.version, "DPDK": ovs and ovs.dpdk_version}
        return {name: text or "none" for name, text in found.items()}

    def _names(self) -> dict[str, str]:
        """Return the names of this host and its ports, with what the report has in their place."""
        found = {platform.node(): "HOST", platform.node().partition(".")[0]: "HOST", self._run.name: "RUN"}
        found |= {device: "DEVICE" for device in self._devices if ":" not in device}
        for number, network in enumerate(self._networks, 1):
            found |= {network.name: f"network {number}", network.bridge or "": f"bridge {number}"}
        found |= {pf.name: f"NIC {number}" for number, pf in enumerate(self._host.look().pfs.values(), 1)}
        for port in self._agent.list_ports():
            found |= {port.port_id: "PORT", port.spec.vm_id: "VM"}
        return found

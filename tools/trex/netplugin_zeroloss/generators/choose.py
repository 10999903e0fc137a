"""Generator descriptions, one model per ``type``, for YAML files and options; creates the generator."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal, TypeVar, assert_never

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from netplugin_zeroloss.generators.contract import IN_FLIGHT, Generator
from netplugin_zeroloss.generators.exec import ExecGenerator
from netplugin_zeroloss.generators.frames import Frames, Mac
from netplugin_zeroloss.generators.sim import sim_generator
from netplugin_zeroloss.generators.tcpreplay import MOST_BURST, TcpreplayGenerator
from netplugin_zeroloss.generators.trex_stf import StfProfile, TrexStfGenerator
from netplugin_zeroloss.generators.trex_stl import StlPath, StlProfile, StlServer, TrexStlGenerator
from netplugin_zeroloss.machines.contract import LocalMachine, SshMachine

Positive = Annotated[float, Field(ge=1e-6, le=1e15, allow_inf_nan=False)]
_Paths = TypeVar("_Paths", bound="tuple[TrexPath | InterfacePath, ...]")
TcpPort = Annotated[int, Field(ge=1, le=65535)]


class _Description(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Sim(_Description):
    """A simulated device (``sim.FAMILIES``), in virtual time."""

    type: Literal["sim"] = "sim"
    device: str = "clean"
    seed: int | str = 1
    #: In pps, all directions together; None: the capacity of the device.
    capacity_pps: Positive | None = None


class Exec(_Description):
    """A program that speaks JSON lines. The command is quoted as in a shell; no shell is started."""

    type: Literal["exec"] = "exec"
    command: str
    #: Seconds allowed for an answer, in addition to the trial duration.
    answer_timeout_s: Positive = 60.0


class TrexPath(_Description):
    """TRex port numbers: frames leave one port and return at the other."""

    send: Annotated[int, Field(ge=0)]
    receive: Annotated[int, Field(ge=0)]
    frames: Frames = Frames()


def _each_once(paths: _Paths) -> _Paths:
    """Reject a port that sends, or receives, for two paths: its counters could not be split."""
    for name in ("send", "receive"):
        ends = [getattr(path, name) for path in paths]
        if len(set(ends)) < len(ends):
            raise ValueError(f"no two paths may {name} at the same port")
    return paths


class TrexStl(_Description):
    """The stateless client of TRex with a running server, or one started from ``trex_dir``."""

    type: Literal["trex-stl"] = "trex-stl"
    #: TRex installation directory with the client package; None: the installed Python package.
    trex_dir: Path | None = None
    #: Start a server from ``trex_dir`` with this configuration and stop it at the end; None: one is
    #: running.
    trex_cfg: Path | None = None
    server: str = "127.0.0.1"
    sync_port: TcpPort = 4501
    async_port: TcpPort = 4500
    paths: Annotated[tuple[TrexPath, ...], Field(min_length=1), AfterValidator(_each_once)] = (
        TrexPath(send=0, receive=1),
    )
    #: Profile (a Python file with ``register``) that replaces the built-in frames.
    profile: Path | None = None
    profile_arguments: tuple[str, ...] = ()
    #: Acquire ports that another session owns.
    force: bool = False
    #: Frames that the device can hold: a trial may stop early when more are missing.
    in_flight: Annotated[int, Field(ge=0)] = IN_FLIGHT
    #: Upper limit of the load in pps, all paths together; None: from the port speed.
    max_pps: Positive | None = None


class PortMacs(_Description):
    """MAC addresses of the frames that a port sends."""

    source_mac: Mac
    destination_mac: Mac


class TrexStf(_Description):
    """One stateful batch of TRex per trial: ``t-rex-64 -f PROFILE -m X -d S``, on ``machine``."""

    type: Literal["trex-stf"] = "trex-stf"
    machine: Annotated[LocalMachine | SshMachine, Field(discriminator="type")] = LocalMachine()
    #: Paths of the machine.
    trex_dir: Path
    #: None: TRex's default, /etc/trex_cfg.yaml.
    trex_cfg: Path | None = None
    #: Per port of the configuration, cyclic; empty: those of the configuration.
    macs: tuple[PortMacs, ...] = ()
    #: Relative to ``trex_dir``.
    profile: str = "cap2/imix_64_fast.yaml"
    #: Frames per second at ``-m 1``; None: reported by TRex in a short run.
    pps_per_m: Positive | None = None
    #: Additional options for ``t-rex-64``, such as ``-c 4`` or ``-p``.
    arguments: tuple[str, ...] = ()
    max_pps: Positive | None = None


class InterfacePath(_Description):
    """Interface names: frames leave one interface and return at the other."""

    send: Annotated[str, Field(min_length=1, max_length=15)]
    receive: Annotated[str, Field(min_length=1, max_length=15)]
    frames: Frames = Frames()


class Tcpreplay(_Description):
    """One tcpreplay process per direction, and exact counters at the receivers."""

    type: Literal["tcpreplay"] = "tcpreplay"
    paths: Annotated[tuple[InterfacePath, ...], Field(min_length=1), AfterValidator(_each_once)]
    #: Name or path of the network namespace of the interfaces; None: that of this process.
    netns: str | None = None
    #: Upper limit of the load in pps, all paths together.
    max_pps: Positive | None = None
    #: Run with real-time priority; without it tcpreplay sends in bursts.
    realtime: bool = True
    #: Trials with larger bursts are invalid; in frames.
    most_burst: Annotated[int, Field(ge=1)] = MOST_BURST
    in_flight: Annotated[int, Field(ge=0)] = IN_FLIGHT


Description = Annotated[Sim | Exec | TrexStl | TrexStf | Tcpreplay, Field(discriminator="type")]


def make(description: Sim | Exec | TrexStl | TrexStf | Tcpreplay) -> Generator:
    """Create a generator, ready for its first trial. The caller closes it.

    Raises: UnusableInput, GeneratorError, before any traffic.
    """
    match description:
        case Sim():
            return sim_generator(
                description.device, str(description.seed), capacity_pps=description.capacity_pps
            )
        case Exec():
            return ExecGenerator(description.command, description.answer_timeout_s)
        case Tcpreplay():
            return TcpreplayGenerator(
                [(path.send, path.receive, path.frames) for path in description.paths],
                description.netns,
                description.max_pps or math.inf,
                realtime=description.realtime,
                most_burst=description.most_burst,
                in_flight=description.in_flight,
            )
        case TrexStl():
            return _stateless(description)
        case TrexStf():
            return TrexStfGenerator(
                description.trex_dir,
                StfProfile(
                    description.profile,
                    description.trex_cfg,
                    description.arguments,
                    tuple((each.source_mac, each.destination_mac) for each in description.macs),
                ),
                description.pps_per_m,
                description.max_pps or math.inf,
                description.machine,
            )
        case _:
            assert_never(description)


def _stateless(description: TrexStl) -> Generator:
    profile = description.profile
    return TrexStlGenerator(
        [StlPath(path.send, path.receive, path.frames) for path in description.paths],
        StlServer(
            description.server,
            description.sync_port,
            description.async_port,
            description.force,
            description.trex_cfg,
        ),
        description.trex_dir,
        StlProfile(profile, description.profile_arguments) if profile else None,
        description.max_pps,
        description.in_flight,
    )

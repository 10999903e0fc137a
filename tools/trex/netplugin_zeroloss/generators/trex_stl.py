"""The generator ``trex-stl``: a program of ours that speaks the protocol of ``exec`` (``trex_stl_trials``).

TRex's package puts its own scapy, zmq and yaml before the installed ones, so it is imported in a process of
its own, in which nothing else uses them.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field

from netplugin_zeroloss.generators import contract
from netplugin_zeroloss.generators.exec import ExecGenerator
from netplugin_zeroloss.generators.frames import Frames
from netplugin_zeroloss.generators.trex_program import serving
from netplugin_zeroloss.values import UnusableInput

#: Directory of the client package within a TRex installation.
PACKAGE: Final = Path("automation/trex_control_plane/interactive")
_PROGRAM: Final = "netplugin_zeroloss.generators.trex_stl_trials"
_TcpPort = Annotated[int, Field(ge=1, le=65535)]


class TrexPath(contract.GeneratorDescription):
    """TRex port numbers: frames leave one port and return at the other."""

    send: contract.Count
    receive: contract.Count
    frames: Frames = Frames()


class TrexStl(contract.GeneratorDescription):
    """The stateless client of TRex with a running server, or one started from ``trex_dir``."""

    type: Literal["trex-stl"] = "trex-stl"
    #: TRex installation directory with the client package; None: the installed Python package.
    trex_dir: Path | None = None
    #: Start a server from ``trex_dir`` with this configuration and stop it at the end; None: one is
    #: running.
    trex_cfg: Path | None = None
    server: str = "127.0.0.1"
    sync_port: _TcpPort = 4501
    async_port: _TcpPort = 4500
    paths: Annotated[tuple[TrexPath, ...], Field(min_length=1), AfterValidator(contract.each_once)] = (
        TrexPath(send=0, receive=1),
    )
    #: Profile (a Python file with ``register``) that replaces the built-in frames.
    profile: Path | None = None
    profile_arguments: tuple[str, ...] = ()
    #: Acquire ports that another session owns.
    force: bool = False
    #: Frames that the device can hold: a trial may stop early when more are missing.
    in_flight: contract.Count = contract.IN_FLIGHT
    #: Upper limit of the load in pps, all paths together; None: from the port speed.
    max_pps: contract.Positive | None = None


class TrexStlGenerator(ExecGenerator):
    """Owns the ports of its paths, and a server that it starts, from construction until ``close``."""

    def __init__(self, description: TrexStl) -> None:
        """Raises: UnusableInput, GeneratorError."""
        chosen = description
        if chosen.profile is not None and not chosen.profile.is_file():
            raise UnusableInput("--trex-profile", f"{chosen.profile}: no such file")
        if chosen.trex_dir is not None and not (chosen.trex_dir / PACKAGE / "trex").is_dir():
            why = f"{chosen.trex_dir} is no tree of TRex: it has no {PACKAGE}"
            raise UnusableInput("--trex-dir", why)
        opened = ExitStack()
        if chosen.trex_cfg is not None:
            if chosen.trex_dir is None:
                raise UnusableInput("--trex-cfg", "a server is started from --trex-dir: say it")
            opened.enter_context(closing(serving(chosen.trex_dir, chosen.trex_cfg, chosen.sync_port)))
        # -P: do not search the working directory for modules.
        python = ["env", f"PYTHONPATH={os.pathsep.join(filter(None, sys.path))}", sys.executable, "-P"]
        super().__init__([*python, "-m", _PROGRAM, chosen.model_dump_json()], who="TRex", opened=opened)

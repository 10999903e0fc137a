"""Parent side of the stateless TRex client: a child process that owns ports of a server."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict

from netplugin.acceptance.errors import UnusableInput
from netplugin.acceptance.generators.dialogue import Dialogue
from netplugin.acceptance.generators.trex_program import TrexServer
from netplugin.acceptance.generators.trex_stl import StlReading

#: Directory of the client package within a TRex installation.
PACKAGE: Final = Path("automation/trex_control_plane/interactive")
_CHILD: Final = Path(__file__).with_name("trex_stl_child.py")
#: Seconds for an answer; the client itself gives up on a server after a few seconds.
_ANSWER_S: Final = 30.0
#: Seconds to connect: importing scapy is slow, and the client retries an absent server.
_CONNECT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class StlServer:
    """Address of the server; ``force`` acquires ports that another session owns."""

    host: str = "127.0.0.1"
    sync_port: int = 4501
    async_port: int = 4500
    force: bool = False
    #: Configuration to start the server with, and stop it at the end; None: it is running.
    configuration: Path | None = None


class _Answer(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class _Connected(_Answer):
    version: str
    speeds_gbps: tuple[float, ...]
    drivers: tuple[str, ...]


class StlRead(_Answer):
    """Counters, and the monotonic times in seconds before and after reading them."""

    from_s: float
    to_s: float
    active: bool
    ports: dict[str, dict[str, Any]]
    raw_global: dict[str, Any]

    @property
    def counts(self) -> StlReading:
        return StlReading.parse(self.ports, self.raw_global)


class StlClient:
    """Owns the ports from construction until ``close``."""

    def __init__(self, server: StlServer, trex_dir: Path | None, ports: list[int]) -> None:
        """``trex_dir`` None: use the installed client package.

        Raises: UnusableInput, GeneratorError.
        """
        package = _package(trex_dir)
        with ExitStack() as opened:
            if server.configuration is not None:
                if trex_dir is None:
                    raise UnusableInput("--trex-cfg", "a server is started from --trex-dir: say it")
                started = TrexServer(trex_dir, server.configuration, server.sync_port)
                opened.callback(started.close)
            # -P: do not search the directory of the script for modules.
            self._child = Dialogue("TRex", [sys.executable, "-P", str(_CHILD)])
            opened.callback(self._child.close)
            about = self._child.ask(
                {
                    "op": "connect", "package": package, "server": server.host,
                    "sync_port": server.sync_port, "async_port": server.async_port,
                    "ports": ports, "force": server.force,
                },
                _CONNECT_S, _Connected,
            )  # fmt: skip
            self._opened = opened.pop_all()
        self.version = about.version
        self.drivers = sorted(set(about.drivers))
        self.speeds_gbps = dict(zip(ports, about.speeds_gbps, strict=True))

    def tell(self, what: str, **more: Any) -> None:
        """Send a command that has no result. Raises: GeneratorError."""
        self._child.ask({"op": what, **more}, _ANSWER_S, _Answer)

    def read(self) -> StlRead:
        """Read the counters of all ports. Raises: GeneratorError."""
        return self._child.ask({"op": "read"}, _ANSWER_S, StlRead)

    def close(self) -> None:
        """Release the ports, and stop the server if it was started here. Idempotent."""
        self._opened.close()


def _package(trex_dir: Path | None) -> str | None:
    if trex_dir is None:
        return None
    package = (trex_dir / PACKAGE).resolve()
    if not (package / "trex").is_dir():
        raise UnusableInput("--trex-dir", f"{trex_dir} is no tree of TRex: it has no {PACKAGE}")
    return str(package)

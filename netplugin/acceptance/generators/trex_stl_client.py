"""The stateless client of TRex as the parent sees it: a child process that owns ports of a server."""

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

#: Where the tree of TRex has the package of its client.
PACKAGE: Final = Path("automation/trex_control_plane/interactive")
_CHILD: Final = Path(__file__).with_name("trex_stl_child.py")
#: An answer of the client: it gives up on a server by itself after a few seconds.
_ANSWER_S: Final = 30.0
#: Scapy takes seconds to import, and a server that is not there is tried several times.
_CONNECT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class StlServer:
    """Where the server is; ``force`` takes ports that another session has."""

    host: str = "127.0.0.1"
    sync_port: int = 4501
    async_port: int = 4500
    force: bool = False
    #: It is to be started with this, and ended; None: it runs.
    configuration: Path | None = None


class _Answer(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class _Connected(_Answer):
    version: str
    speeds_gbps: tuple[float, ...]
    drivers: tuple[str, ...]


class StlRead(_Answer):
    """Counters that were read between two times of the monotonic clock, in seconds."""

    from_s: float
    to_s: float
    active: bool
    ports: dict[str, dict[str, Any]]
    raw_global: dict[str, Any]

    @property
    def counts(self) -> StlReading:
        return StlReading.parse(self.ports, self.raw_global)


class StlClient:
    """Owns ports from the start until it is closed."""

    def __init__(self, server: StlServer, trex_dir: Path | None, ports: list[int]) -> None:
        """``trex_dir`` None: the client's package is an installed one.

        Raises: UnusableInput, GeneratorError.
        """
        package = _package(trex_dir)
        with ExitStack() as opened:
            if server.configuration is not None:
                if trex_dir is None:
                    raise UnusableInput("--trex-cfg", "a server is started from --trex-dir: say it")
                started = TrexServer(trex_dir, server.configuration, server.sync_port)
                opened.callback(started.close)
            # -P: nothing beside the script is to be found as a module.
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
        """One of the questions of the child that have no answer. Raises: GeneratorError."""
        self._child.ask({"op": what, **more}, _ANSWER_S, _Answer)

    def read(self) -> StlRead:
        """Raises: GeneratorError."""
        return self._child.ask({"op": "read"}, _ANSWER_S, StlRead)

    def close(self) -> None:
        """Give the ports back, and end the server if it was started here; may be called twice."""
        self._opened.close()


def _package(trex_dir: Path | None) -> str | None:
    if trex_dir is None:
        return None
    package = (trex_dir / PACKAGE).resolve()
    if not (package / "trex").is_dir():
        raise UnusableInput("--trex-dir", f"{trex_dir} is no tree of TRex: it has no {PACKAGE}")
    return str(package)

"""Generator descriptions, one model per ``type``, for YAML files and options; creates the generator."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from netplugin_zeroloss.generators.contract import Generator
from netplugin_zeroloss.generators.exec import Exec, ExecGenerator
from netplugin_zeroloss.generators.sim import Sim, sim_generator
from netplugin_zeroloss.generators.tcpreplay import Tcpreplay, TcpreplayGenerator
from netplugin_zeroloss.generators.trex_stf import PortMacs, TrexStf, TrexStfGenerator
from netplugin_zeroloss.generators.trex_stl import TrexStl, TrexStlGenerator

__all__ = ["Description", "Exec", "PortMacs", "Sim", "Tcpreplay", "TrexStf", "TrexStl", "make"]

Description = Annotated[Sim | Exec | TrexStl | TrexStf | Tcpreplay, Field(discriminator="type")]


def make(description: Description) -> Generator:
    """Create a generator, ready for its first trial. The caller closes it.

    Raises: UnusableInput, GeneratorError, before any traffic.
    """
    match description:
        case Sim():
            seed, most = str(description.seed), description.capacity_pps
            return sim_generator(description.device, seed, most)
        case Exec():
            return ExecGenerator(description.command, description.answer_timeout_s)
        case Tcpreplay():
            return TcpreplayGenerator(description)
        case TrexStl():
            return TrexStlGenerator(description)
        case TrexStf():
            return TrexStfGenerator(description)

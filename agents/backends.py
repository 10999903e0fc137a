"""Loads the enabled backends; a backend that fails to load does not affect the others."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stevedore import named

from netplugin.backend import Backend, Observation
from netplugin.data_path import GROUP
from netplugin.host.shared import Host

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """The loaded backends, and the reasons why others failed to load."""

    backends: dict[str, Backend[Observation]]
    broken: dict[str, str]


def load(names: Sequence[str], conf: Any, host: Host) -> Loaded:
    """Load backends by entry point; each is created as ``Driver(conf, host)``."""
    broken: dict[str, str] = {}

    def failed(manager: Any, entry_point: Any, error: BaseException) -> None:
        broken[entry_point.name] = f"could not be loaded: {error}"
        LOG.error("backend %s could not be loaded", entry_point.name, exc_info=error)

    manager = named.NamedExtensionManager(
        GROUP,
        names=list(names),
        invoke_on_load=True,
        invoke_args=(conf, host),
        on_load_failure_callback=failed,
        warn_on_missing_entrypoint=False,
    )
    backends = {extension.name: extension.obj for extension in manager if extension.obj is not None}
    for name in names:
        if name not in backends and name not in broken:
            broken[name] = f"no backend of this name is installed (entry point group {GROUP})"
    return Loaded(backends, broken)

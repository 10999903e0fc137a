"""Loads the enabled backends; a backend that fails to load does not affect the others."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from oslo_config import cfg
from stevedore import named

from netplugin import options
from netplugin.api.errors import NetpluginError
from netplugin.backend import Backend, Observation
from netplugin.data_path import GROUP, installed
from netplugin.host.shared import Host
from netplugin.spelling import did_you_mean

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
        reason = options.error_text(error)
        broken[entry_point.name] = f"could not be loaded: {reason}"
        # Of what the operator can correct the sentence is enough.
        known = isinstance(error, cfg.Error | ValueError | NetpluginError)
        LOG.error(
            "backend %s could not be loaded: %s", entry_point.name, reason, exc_info=None if known else error
        )

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
            broken[name] = not_installed(name)
            LOG.error("backend %s: %s", name, broken[name])
    return Loaded(backends, broken)


def not_installed(name: str) -> str:
    """Why a backend of this name cannot be loaded, with those that can."""
    names = installed().names
    return (
        "no backend of this name is installed: correct [agent] enabled_backends; installed are "
        f"{', '.join(sorted(names))}{did_you_mean(name, names)}"
    )

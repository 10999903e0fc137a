"""Reads the configuration: what an agent starts with, and all that is wrong with it for ``--check``."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from oslo_config import cfg

from agents.api.callbacks import TaskSettings
from agents.api.guard import Limits
from agents.api.listen import Credentials, Listen
from agents.backends import not_installed
from agents.fleet.settings import FleetSettings
from agents.host.view import HostView
from netplugin import options
from netplugin.data_path import installed
from netplugin.host.ovs import OvsSettings
from netplugin.host.safe_files import open_own

#: What reading a configuration raises.
UNUSABLE = (cfg.Error, ValueError, OSError)


@dataclass(frozen=True)
class Configuration:
    """The files, read and validated."""

    conf: Any
    listen: Listen
    view: HostView
    tasks: TaskSettings
    credentials: Credentials
    limits: Limits
    fleet: FleetSettings | None

    @classmethod
    def read(cls, files: Sequence[Path]) -> Configuration:
        """Raises: cfg.Error, ValueError, OSError, of the first that is wrong."""
        conf = load(files)
        listen = Listen.read(conf)
        OvsSettings.read(conf)  # report errors in these options once, not per backend
        return cls(
            conf,
            listen,
            HostView.read(conf),
            TaskSettings.read(conf),
            Credentials(listen),
            Limits(conf.api.changes_per_second, conf.api.calls_at_once),
            FleetSettings.read(conf),
        )


def mistakes(files: Sequence[Path]) -> list[str]:
    """All that is wrong with these files, with the option's name. Nothing is started or changed."""
    try:
        conf = _load(files)
    except UNUSABLE as wrong:
        return [options.error_text(wrong)]
    groups: list[tuple[str, list[Any]]] = []
    packages = {backend.dist.name: backend.dist for backend in installed() if backend.dist}
    for package in packages.values():
        for entry in package.entry_points.select(group="oslo.config.opts"):  # as oslo-config-generator does
            groups += entry.load()()
    found: dict[str, None] = {}

    def attempt(read: Callable[[], object]) -> None:
        try:
            read()
        except UNUSABLE as wrong:
            found.setdefault(options.error_text(wrong))

    for group, known in groups:
        conf.register_opts(known, group=None if group == "DEFAULT" else group)
        for option in known:
            attempt(partial(_read, conf, group, option))
    unknown = [finding.found for finding in options.unknown(conf)]
    if found:
        return [*found, *unknown]
    readers: list[Callable[[Any], object]] = [
        OvsSettings.read,
        HostView.read,
        TaskSettings.read,
        FleetSettings.read,
        lambda conf: Credentials(Listen.read(conf)),
    ]
    readers += [partial(_check_backend, name) for name in conf.agent.enabled_backends]
    for read in readers:
        attempt(partial(read, conf))
    return [*found, *unknown]


def load(files: Sequence[Path]) -> Any:
    """The options, with valid values. Raises: cfg.Error, ValueError, OSError."""
    conf = _load(files)
    for group, known in options.GROUPS.items():
        for option in known:
            _read(conf, group, option)
    return conf


def _load(files: Sequence[Path]) -> Any:
    """Raises: cfg.Error, ValueError, OSError."""
    for file in filter(Path.is_file, files):
        os.close(open_own(file, links=True))
    return options.load(list(files))


def _read(conf: Any, group: str, option: Any) -> object:
    """Read an option now: oslo.config validates a value only when it is read. Raises: ValueError."""
    try:
        return getattr(conf if group == "DEFAULT" else conf[group], option.dest)
    except cfg.Error as wrong:
        raise ValueError(f"[{group}] {options.error_text(wrong)}") from None


def _check_backend(name: str, conf: Any) -> None:
    """Raises: ValueError for options of the backend, or if it is not installed; cfg.Error."""
    found = installed()
    if name not in found.names:
        raise ValueError(f"[agent] enabled_backends {name}: {not_installed(name)}")
    try:
        backend = found[name].load()
    except Exception as error:  # whatever another package raises when it is imported
        raise ValueError(f"[agent] enabled_backends {name}: it could not be loaded: {error}") from error
    backend.check_options(conf)

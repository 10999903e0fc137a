"""The command ``netplugin-agent``: reads the configuration and runs the agent until it is terminated."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import gc
import json
import logging
import os
import signal
import socket
import sqlite3
import sys
import time
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn

from agents import backends
from agents.api import http
from agents.api.audit import AuditLog
from agents.api.connections import ConnectionLimits
from agents.api.guard import RequestGuard
from agents.api.listen import Credentials
from agents.api.roles import BodyRules
from agents.api.server import Server
from agents.api.tasks import TaskRunner
from agents.configuration import UNUSABLE, Configuration, mistakes
from agents.service import Service
from agents.store.store import Store
from agents.telemetry.metrics import Metrics
from netplugin import options, store_file
from netplugin.api.errors import NetpluginError, reason
from netplugin.host.safe_files import keep_to_owner, own_directory
from netplugin.host.shared import Host
from netplugin.host.supervisor import Supervisor
from netplugin.spelling import Parser

if TYPE_CHECKING:
    from agents.fleet.runner import Fleet

LOG = logging.getLogger(__name__)
# Seconds to wait for the first reconcile before accepting calls.
_FIRST_LOOK_S = 5.0
# Seconds between looks for backends that have become usable or unusable.
_COMPARE_S = 1.0
# Seconds after which a thread that computes lets others go on; Python's default is 5 ms. A call is handed
# from thread to thread, and waits that long each time while a look at a thousand ports computes.
_SWITCH_S = 0.001
# Seconds between two returns of freed memory: a look at all ports takes some for a moment, and malloc keeps
# it. One takes a few milliseconds, and calls need not wait for it.
_TRIM_S = 30.0
# Seconds after SIGTERM: refuse queued calls, finish calls in progress, terminate the process.
_REFUSE_AFTER_S, _ANSWERED_S, _END_S = 30, 42, 55


def parser() -> Parser:
    made = Parser(
        prog="netplugin-agent", description="Read the configuration and run the agent until it is terminated."
    )
    made.add_argument("--version", action="version", version=f"%(prog)s {version('netplugin')}")
    made.add_argument(
        "--config-file",
        action="append",
        type=Path,
        default=[],
        metavar="FILE",
        help="a configuration file; may be given several times, later ones win",
    )
    made.add_argument(
        "--check",
        action="append",
        type=Path,
        metavar="FILE",
        help="check this configuration and exit; nothing is started or changed. Exit status: 0 if it is "
        "valid, 2 if not",
    )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 2: invalid configuration; nothing was changed, and a restart does not help.

    1: a resource is unavailable (another agent, a disk, a port); a restart may succeed.
    """
    arguments = parser().parse_args(argv)
    keep_to_owner()
    if arguments.check:
        return _check([*arguments.config_file, *arguments.check])
    sys.setswitchinterval(_SWITCH_S)
    try:
        read = Configuration.read(arguments.config_file)
        _log_to_stderr(read.conf.log_level)
        audit = AuditLog(Path(read.conf.api.audit_log) if read.conf.api.audit_log else None)
    except UNUSABLE as wrong:
        print(f"netplugin-agent: {options.error_text(wrong)}", file=sys.stderr)
        return 2
    conf = read.conf
    with contextlib.ExitStack() as held:
        held.callback(audit.close)
        # Until the first look: what a start makes stays, and to search it for garbage takes a tenth of its
        # CPU time.
        gc.disable()
        held.callback(gc.enable)
        try:
            state_path = Path(conf.state_path)
            own_directory(state_path, 0o700)
            held.enter_context(store_file.locked(state_path))
            store = Store(
                state_path / store_file.DATABASE,
                conf.tasks.max_tasks,
                conf.tasks.max_bytes,
                conf.agent.max_events,
            )
        except (store_file.InUse, ValueError, OSError, NetpluginError, sqlite3.Error) as wrong:
            place = f"[DEFAULT] state_path {conf.state_path}: " if isinstance(wrong, OSError) else ""
            print(f"netplugin-agent: {place}{reason(wrong)}", file=sys.stderr)
            return 1
        held.callback(store.close)
        return _run(read, store, audit)


def _check(files: list[Path]) -> int:
    found = mistakes(files)
    for mistake in found:
        print(f"netplugin-agent: {mistake}", file=sys.stderr)
    if not found:
        print(f"{', '.join(map(str, files))}: no mistakes found")
    return 2 if found else 0


def _run(read: Configuration, store: Store, audit: AuditLog) -> int:
    conf, credentials = read.conf, read.credentials
    host = Host(conf, store.identity, store.marks.after, store.claimed)
    loaded = backends.load(conf.agent.enabled_backends, conf, host)
    ignored = tuple(options.unknown(conf))
    for finding in ignored:
        LOG.warning("%s", finding.found)
    metrics = Metrics(store)
    service = Service(conf, store, metrics, host, loaded.backends, loaded.broken, read.view)
    service.health.ignored = ignored
    tasks = TaskRunner(read.tasks, store.tasks, audit.carried_out, host.supervisor, service.off_loop)
    app = http.build(service, tasks, metrics)
    rules = BodyRules(tuple(conf.agent.service_devices), service.ports.moved_by)
    gate = RequestGuard(app, tasks, credentials, audit, read.limits, service.off_loop, rules)
    metrics.watch_credentials(lambda: credentials.stale)
    server = Server(
        uvicorn.Config(
            gate,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            proxy_headers=False,
            ws="none",
            timeout_graceful_shutdown=_ANSWERED_S,
            timeout_keep_alive=conf.api.idle_timeout,
        ),
        read.listen,
        credentials,
        ConnectionLimits(
            conf.api.max_connections, conf.api.header_timeout, conf.api.body_timeout, conf.api.idle_timeout
        ),
        when_started=lambda: _notify("READY=1"),
    )
    fleet = _fleet(read, service, store, rules, audit, metrics, host.supervisor)
    try:
        return asyncio.run(_serve(server, credentials, app, service, tasks, host.supervisor, fleet))
    finally:
        service.stop()


def _fleet(
    read: Configuration,
    service: Service,
    store: Store,
    rules: BodyRules,
    audit: AuditLog,
    metrics: Metrics,
    supervisor: Supervisor,
) -> Fleet | None:
    """What follows etcd, imported only by an agent that has one."""
    if read.fleet is None:
        store.fleet.turn_off()
        return None
    from agents.fleet.runner import Fleet

    fleet = Fleet(read.fleet, service, store, rules, audit, supervisor)
    metrics.watch_fleet(lambda: fleet.connected, fleet.counts)
    service.health.fleet = fleet.findings
    return fleet


async def _serve(
    server: Server,
    credentials: Credentials,
    app: Any,
    service: Service,
    tasks: TaskRunner,
    supervisor: Supervisor,
    fleet: Fleet | None,
) -> int:
    loop = asyncio.get_running_loop()

    def refuse() -> None:
        # In this order: a refusal must not become the result of an accepted call.
        tasks.park()
        service.refuse_waiting()

    def end() -> None:
        if server.should_exit:
            return
        server.should_exit = True
        service.events.end()
        _notify("STOPPING=1")
        loop.call_later(_REFUSE_AFTER_S, refuse)
        # If shutdown hangs, log the stack of every thread and exit.
        faulthandler.dump_traceback_later(_END_S, exit=True)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end)
    again = partial(credentials.refresh, always=True)
    loop.add_signal_handler(signal.SIGHUP, partial(loop.run_in_executor, None, again))
    await asyncio.to_thread(service.start)  # it writes events
    loops = [asyncio.create_task(each) for each in (credentials.keep(supervisor), service.ports.teams.keep())]
    await tasks.start(app)
    loops.append(asyncio.create_task(_heartbeat(service, supervisor)))
    await asyncio.to_thread(service.wait_looked, _FIRST_LOOK_S)
    # What was made until now stays: a collection that visits all of it takes tens of milliseconds, and
    # every call waits for it.
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    gc.enable()
    if fleet is not None:
        loops.append(asyncio.create_task(fleet.keep()))
    usability = supervisor.every("backend-events", _COMPARE_S, service.health.note_usability)
    loops.append(asyncio.create_task(usability))
    loops.append(asyncio.create_task(supervisor.every("memory", _TRIM_S, release_memory)))
    try:
        await server._serve()
    except OSError as unbound:
        LOG.error("cannot listen: %s", unbound)
        return 1
    finally:
        for each in loops:
            each.cancel()
        await tasks.stop()
        if fleet is not None:
            await fleet.leave()
    return 0


async def _heartbeat(service: Service, supervisor: Supervisor) -> None:
    """Send heartbeats to systemd's watchdog (WatchdogSec=).

    They stop if the event loop or the thread of a backend makes no progress.
    """
    asked = os.environ.get("WATCHDOG_USEC")
    if not asked:
        return

    async def beat() -> None:
        stuck = service.health.stuck()
        if not stuck:
            _notify("WATCHDOG=1")
        for why in stuck:
            LOG.error("no heartbeat: %s", why)

    await supervisor.every("heartbeat", int(asked) / 1e6 / 3, beat)


async def release_memory() -> None:
    """Return the free pages within the heap; malloc by itself returns those at its end (malloc_trim(3)).

    It does nothing with a C library other than glibc. What Python's own allocator keeps stays too: the
    systemd unit sets ``PYTHONMALLOC=malloc``, so that it has none.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        await asyncio.to_thread(trim, 0)


class _JsonLines(logging.Formatter):
    """JSON lines, with the port ID where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name in ("port_id", "audit") if (value := getattr(record, name, None))}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class _ForPeople(logging.Formatter):
    """A short time, the level, the message, and the port."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        port_id = getattr(record, "port_id", None)
        return super().formatMessage(record) + (f" (port {port_id})" if port_id else "")


def _log_to_stderr(level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_ForPeople() if sys.stderr.isatty() else _JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    # Their messages repeat what the agent logs itself.
    for chatty in ("stevedore", "asyncio", "httpx", "httpcore", "uvicorn"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, logging.getLevelName(level)))


def _notify(state: str) -> None:
    """Notify systemd (sd_notify(3)) if it started the agent with a notification socket."""
    path = os.environ.get("NOTIFY_SOCKET")
    if path:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notify:
            notify.connect("\0" + path[1:] if path.startswith("@") else path)
            notify.sendall(state.encode())


if __name__ == "__main__":
    sys.exit(main())

"""A private agent: own configuration, state and port, in a process of its own."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.docs.unit_file import environment
from tests.lab import preloaded
from tests.lab.namespaces import entered, within
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import PATIENCE, Argument, Daemon, Process, Running

READY_DEADLINE_S = 60.0
#: The default of [agent] operation_timeout, in seconds.
OPERATION_S = 30
COMMAND = (sys.executable, "-m", "agents.main")


def with_capabilities(names: Collection[str], command: Sequence[Argument]) -> list[Argument]:
    """The command, started by root, with these capabilities and none that it could get otherwise."""
    bounds = ",".join(["-all", *(f"+{name.removeprefix('CAP_').lower()}" for name in sorted(names))])
    return [
        "setpriv",
        f"--bounding-set={bounds}",
        "--inh-caps=-all",
        "--no-new-privs",
        "--",
        *command,
    ]


class _Preloaded(Daemon):
    """``python -m agents.main`` without the imports, in a network namespace."""

    def __init__(
        self,
        name: str,
        args: Sequence[Argument],
        log: Path,
        netns: str | None,
        capabilities: Collection[str] | None,
    ) -> None:
        super().__init__(name, args, log)
        self._netns, self._capabilities = netns, capabilities

    def _spawned(self, log: int, env: Mapping[str, str]) -> Process:
        with entered(self._netns):
            arguments = self.args[len(COMMAND) :]
            own_sys = self._netns is not None
            return preloaded.agent().start(arguments, env, log, own_sys, self._capabilities)


class PrivateAgent(Running):
    """``netplugin-agent`` in a directory of its own; may be killed and started again."""

    def __init__(
        self,
        directory: Path,
        ovs: PrivateOvs | None = None,
        options: Mapping[str, Mapping[str, str]] | None = None,
        ready: bool = True,
        netns: str | None = None,
        capabilities: Collection[str] | None = None,
        as_installed: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """``options`` by group, over those that a lab needs; see ``etc/netplugin.conf``.

        ``netns`` is the network namespace it runs in, and is called in. ``capabilities`` are all that
        it has of root's (``tests.docs.unit_file`` has the systemd unit's).

        ``as_installed``: started as operators start it, imports, environment and all; the others are
        forks of one that has imported (``preloaded``). ``env``: more of its environment, of one started so.

        ``ready`` false: a host on which the agent will not be ready.
        """
        self._ready = ready
        self.directory = directory
        self._netns = netns
        with entered(netns):
            self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        groups: dict[str, dict[str, str]] = {
            "DEFAULT": {"state_path": str(directory / "state"), "log_level": "DEBUG"},
            # TCP, without credentials: what calls it is the lab, in a network of its own.
            "api": {
                "socket": "",
                "bind_host": "127.0.0.1",
                "bind_port": str(self.port),
                "insecure_loopback": "true",
            },
            "tasks": {"callback_insecure_http": "true"},
            "agent": {
                "enabled_backends": "dpdkvhostuser" if ovs else "linuxbridge",
                "operation_timeout": str(round(OPERATION_S * PATIENCE)),
            },
            "dpdkvhostuser": {"guest_hugepages": "false"},
        }
        if ovs is not None:
            groups["ovs"] = {
                "connection": ovs.connection,
                "vhost_socket_dir": str(directory / "vhost"),
                "vhost_socket_group": "root",
                "bridge_mappings": "physnet1:br-phys1",
            }
        for group, values in (options or {}).items():
            groups.setdefault(group, {}).update(values)
        self.groups = groups
        self.config = directory / "netplugin.conf"
        self.log = directory / "agent.log"
        args: list[Argument] = [*COMMAND, "--config-file", self.config]
        self.daemon: Daemon
        if as_installed:
            if capabilities is not None:
                args = with_capabilities(capabilities, args)
            self.daemon = Daemon(
                "netplugin-agent", within(netns, args), self.log, environment() | dict(env or {})
            )
        else:
            self.daemon = _Preloaded("netplugin-agent", args, self.log, netns, capabilities)

    def begin(self) -> None:
        self.start(ready=self._ready)

    def run_by(self, module: str, *arguments: Argument) -> None:
        """From its next start on a module runs it, which takes these arguments before the agent's own.

        For one that is started ``as_installed``.
        """
        by = (module, *map(str, arguments))
        self.daemon.args = tuple(
            word for given in self.daemon.args for word in (by if given == COMMAND[-1] else (given,))
        )

    def start(self, ready: bool = True) -> None:
        """Start it; with ``ready`` wait until it has looked at the host, else until it listens."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self.config.write_text(self._text())
        self.daemon.start()
        path = "/readyz" if ready else "/healthz"
        self.daemon.wait_for(lambda: self.get(path)[0] == 200, READY_DEADLINE_S, f"the agent answers {path}")

    def start_with_orphans(self) -> None:
        """Start it on a host with ports that its store does not know, which keep it from being ready."""
        self.start(ready=False)
        self.daemon.wait_for(
            lambda: self.call("POST", "/v1/reconcile", {})[1]["errors"] == [],
            READY_DEADLINE_S,
            "the agent has looked at the host",
        )

    def lose_store(self) -> None:
        """Stop it, and start it with an empty store."""
        self.stop()
        shutil.rmtree(self.directory / "state")
        self.start_with_orphans()

    def start_without_orphans(self) -> None:
        """Start it, and remove what its store does not know: a test that failed may leave that."""
        self.start(ready=False)

        def removed() -> bool:
            self.call("POST", "/v1/reconcile", {"remove_orphans": True})
            return self.get("/readyz")[0] == 200

        self.daemon.wait_for(removed, READY_DEADLINE_S, "the agent is ready without orphans")

    def restart_with(self, options: Mapping[str, Mapping[str, str]]) -> None:
        """Stop it, and start it with these options over those that it had."""
        self.stop()
        for group, values in options.items():
            self.groups.setdefault(group, {}).update(values)
        self.start()

    def stop(self) -> None:
        self.daemon.stop()

    def kill(self) -> None:
        self.daemon.kill()

    def get(self, path: str) -> tuple[int, Any]:
        return self.call("GET", path)

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = 180.0,
    ) -> tuple[int, Any]:
        """The status and the decoded body; status 0 if nobody listens, or the answer breaks off."""
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path,
            data=data,
            method=method,
            headers={"content-type": "application/json", **(headers or {})},
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with entered(self._netns), opener.open(request, timeout=timeout) as answer:
                return answer.status, _decoded(answer.read())
        except urllib.error.HTTPError as refused:
            return refused.code, _decoded(refused.read())
        except (OSError, http.client.HTTPException):
            return 0, None

    def _text(self) -> str:
        lines: list[str] = []
        for group, values in self.groups.items():
            lines += [f"[{group}]", *(f"{key} = {value}" for key, value in values.items())]
        return "\n".join(lines) + "\n"


def _decoded(body: bytes) -> Any:
    try:
        return json.loads(body) if body else None
    except ValueError:
        return body.decode(errors="replace")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

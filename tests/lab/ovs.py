"""A private Open vSwitch, with DPDK, without, or with dummy devices: own database, sockets, daemons."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from netplugin.host.ovs_sockets import OvsSockets
from tests.lab.namespaces import within
from tests.lab.ovs_releases import OvsPrograms
from tests.lab.processes import PATIENCE, Argument, CommandError, Daemon, LabError, Running, run

DATAPATH_TAP = "ovs-netdev"
START_DEADLINE_S = 60.0
# A unix socket's path has 108 bytes; "ovs-vswitchd.<pid>.ctl" is the longest name in here.
LONGEST_DIRECTORY = 80
# No device: OVS before 4.0 probes all that is bound to vfio-pci, unless dpdk-extra lists some. 4.0 lists for
# each bus a device that there is not, and does not start if DPDK lacks the driver of one of them.
NO_DEVICE = "-a 0000:00:00.0"
# In 3.1 it is pmd-maxsleep, which newer ones read too, with a warning (NEWS, v3.2.0).
_SLEEP_RENAMED = (3, 2)


@dataclass(frozen=True, slots=True)
class OvsOptions:
    """How a private OVS runs. The defaults fit two cores and a small loan of hugepages."""

    dpdk: bool = True
    pmd_mask: str = "0x2"
    socket_mem_mb: int = 256
    pmd_maxsleep_us: int = 500
    """Longest sleep of an idle PMD, so that it leaves the core to others; 0 polls all the time."""

    def other_config(self, version: tuple[int, ...]) -> dict[str, str]:
        if not self.dpdk:
            return {}
        memory = str(self.socket_mem_mb)
        sleep = "pmd-sleep-max" if version >= _SLEEP_RENAMED else "pmd-maxsleep"
        return {
            "dpdk-init": "true",
            "dpdk-socket-mem": memory,
            # Without a limit one mempool would take every hugepage the machine has.
            "dpdk-socket-limit": memory,
            "dpdk-extra": f"{NO_DEVICE} --in-memory",
            "pmd-cpu-mask": self.pmd_mask,
            sleep: str(self.pmd_maxsleep_us),
        }


class PrivateOvs(Running):
    """ovsdb-server and ovs-vswitchd in one directory; each may be stopped, killed and paused.

    One at a time in a network namespace (``netns``, or the one we are in): the userspace datapath
    has a tap with a fixed name. Not so with ``dummy``: as in OVS's own tests every device and datapath
    is one of OVS's dummies then (tests/ofproto-macros.at), so that it touches no device and needs no
    root.
    """

    def __init__(
        self,
        directory: Path,
        dpdk: bool = True,
        pmd_mask: str = "0x2",
        socket_mem_mb: int = 256,
        other_config: Mapping[str, str] | None = None,
        pmd_maxsleep_us: int = 500,
        netns: str | None = None,
        dummy: bool = False,
    ) -> None:
        if len(os.fsencode(directory)) > LONGEST_DIRECTORY:
            raise LabError(f"{directory}: too long a path for unix sockets, use one under /run")
        self.directory = directory
        self.netns = netns
        self.options = OvsOptions(dpdk and not dummy, pmd_mask, socket_mem_mb, pmd_maxsleep_us)
        self._dummy = dummy
        self.programs = OvsPrograms.in_path()
        self.version = self.programs.version
        self.other_config = {**self.options.other_config(self.version), **(other_config or {})}
        self.rundir = directory
        self.socket = directory / "db.sock"
        self.database = directory / "conf.db"
        self.connection = f"unix:{self.socket}"
        self.sockets = OvsSockets.below(directory)
        # The name it is started by is the name of its control socket, which clients look for.
        self._program = directory / "ovs-vswitchd"
        self.env: dict[str, str] = {
            f"OVS_{name}": str(directory) for name in ("RUNDIR", "DBDIR", "LOGDIR", "SYSCONFDIR")
        }
        self.ovsdb = Daemon("ovsdb-server", self._ovsdb_args(), self._log("ovsdb-server"), self.env)
        vswitchd = within(netns, self._vswitchd_args())
        self.vswitchd = Daemon("ovs-vswitchd", vswitchd, self._log("ovs-vswitchd"), self.env)

    def start(self) -> None:
        """Both daemons, with a new database if there is none."""
        if not self._dummy and DATAPATH_TAP in self._links():
            raise LabError("another OVS runs in this network namespace: its bridges would not work")
        self.directory.mkdir(parents=True, exist_ok=True)
        if not self.database.exists():
            run(["ovsdb-tool", "create", self.database, self.programs.schema])
            with_dpdk = self.options.dpdk
            self._program.symlink_to(self.programs.vswitchd_dpdk if with_dpdk else self.programs.vswitchd)
        self.start_ovsdb()
        # As ovs-ctl does: vswitchd itself does not say which version it is.
        version = ".".join(map(str, self.version))
        self.vsctl("--no-wait", "init", "--", "set", "Open_vSwitch", ".", f"ovs_version={version}")
        self.set_other_config(self.other_config, wait=False)
        self.start_vswitchd()

    def stop(self) -> None:
        self.vswitchd.stop()
        self.ovsdb.stop()
        self._delete_taps()

    # ovsdb-server

    def start_ovsdb(self) -> None:
        self.ovsdb.start()
        self.ovsdb.wait_for(self._ovsdb_answers, START_DEADLINE_S, "ovsdb-server answers")

    def stop_ovsdb(self) -> None:
        self.ovsdb.stop()

    def kill_ovsdb(self) -> None:
        self.ovsdb.kill()

    def restart_ovsdb(self) -> None:
        self.stop_ovsdb()
        self.start_ovsdb()

    # ovs-vswitchd

    def start_vswitchd(self, deadline_s: float = START_DEADLINE_S) -> None:
        """Start it and wait until it has applied a change made after this start."""
        self.vswitchd.start()
        # cur_cfg in the database may be the last process's: only a new change tells them apart,
        # and ovs-vsctl returns once it is applied.
        change = f"external_ids:lab-start={uuid.uuid4()}"
        args = [*self._vsctl(deadline_s * PATIENCE), "set", "Open_vSwitch", ".", change]
        with Daemon("ovs-vsctl", args, self._log("ovs-vsctl"), self.env) as client:
            self.vswitchd.wait_for(
                lambda: not client.running, deadline_s, "ovs-vswitchd has applied the configuration"
            )
            if client.status != 0:
                raise LabError(f"ovs-vswitchd does not come up\n{self.vswitchd.tail()}")
        if self.options.dpdk:  # written in a transaction of its own
            self.vswitchd.wait_for(lambda: self.dpdk_initialized, deadline_s, "DPDK is initialized")

    def stop_vswitchd(self) -> None:
        self.vswitchd.stop()

    def kill_vswitchd(self) -> None:
        self.vswitchd.kill()

    def pause_vswitchd(self) -> None:
        self.vswitchd.pause()

    def resume_vswitchd(self) -> None:
        self.vswitchd.resume()

    # clients

    @property
    def dpdk_initialized(self) -> bool:
        return self.vsctl("get", "Open_vSwitch", ".", "dpdk_initialized").strip() == "true"

    def set_other_config(self, values: Mapping[str, str], wait: bool = True) -> None:
        if not values:
            return
        pairs = [f"other_config:{key}={json.dumps(value)}" for key, value in values.items()]
        self.vsctl(*([] if wait else ["--no-wait"]), "set", "Open_vSwitch", ".", *pairs)

    def vsctl(self, *args: Argument, timeout: float = 90.0) -> str:
        return run([*self._vsctl(timeout), *args], timeout + 5, env=self.env)

    def appctl(self, *args: Argument, target: str = "ovs-vswitchd", timeout: float = 90.0) -> str:
        client = ["ovs-appctl", f"--timeout={max(1, round(timeout))}", "-t", target]
        return run([*client, *args], timeout + 5, env=self.env)

    def ofctl(self, *args: Argument, timeout: float = 90.0) -> str:
        client = ["ovs-ofctl", f"--timeout={max(1, round(timeout))}"]
        return run([*client, *args], timeout + 5, env=self.env)

    def dbclient(self, *args: Argument, timeout: float = 90.0) -> str:
        """ovsdb-client: the command first, then what follows the server's address."""
        client = ["ovsdb-client", f"--timeout={max(1, round(timeout))}", args[0], self.connection]
        return run([*client, *args[1:]], timeout + 5, env=self.env)

    def get(self, table: str, record: str, column: str) -> str:
        """The value as ovs-vsctl prints it; nothing while there is no such record or key."""
        return self.vsctl("--if-exists", "get", table, record, column).strip().strip('"')

    def wait_connected(self, port: str, deadline_s: float = 30.0) -> None:
        """Wait until the VM's side of a vhost-user client port is there.

        Before a second VM starts: the first one makes OVS create a mempool, and each attempt that is
        too large for ``dpdk-socket-limit`` uses up the memory for as long as it takes. A VM that
        connects meanwhile is not set up: ``failed to allocate memory for dev->guest_pages``.
        """
        self.vswitchd.wait_for(
            lambda: self._status(port) == "connected",
            deadline_s,
            f"port {port} is connected",
        )

    # inside

    def _delete_taps(self) -> None:
        """The taps of bridges are persistent: they outlive vswitchd, on purpose."""
        if self._dummy or not self.database.exists():
            return
        where = [["type", "==", "internal"]]
        select = {"op": "select", "table": "Interface", "where": where, "columns": ["name"]}
        query = json.dumps(["Open_vSwitch", select])
        (found,) = json.loads(run(["ovsdb-tool", "query", self.database, query]))
        there = self._links("type", "tun")
        for name in (DATAPATH_TAP, *(row["name"] for row in found["rows"])):
            if name in there:
                run(within(self.netns, ["ip", "link", "delete", "dev", name]))

    def _links(self, *which: str) -> set[str]:
        """The names of the devices in its namespace."""
        shown = run(within(self.netns, ["ip", "-j", "link", "show", *which]))
        return {link["ifname"] for link in json.loads(shown or "[]") if link}

    def _status(self, port: str) -> str:
        # A port that vswitchd has not looked at yet has no such key.
        return self.vsctl("--if-exists", "get", "Interface", port, "status:status").strip()

    def _vsctl(self, timeout: float) -> list[str]:
        return ["ovs-vsctl", f"--db={self.connection}", f"--timeout={max(1, round(timeout))}"]

    def _log(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    def _ovsdb_answers(self) -> bool:
        try:
            self.dbclient("list-dbs")
        except CommandError:
            return False  # no socket yet, or that of a killed one
        return True

    def _ovsdb_args(self) -> list[Argument]:
        return [
            "ovsdb-server",
            self.database,
            f"--remote=punix:{self.socket}",
            f"--pidfile={self.rundir / 'ovsdb-server.pid'}",
            "-vconsole:off",
            f"--log-file={self._log('ovsdb-server')}",
        ]

    def _vswitchd_args(self) -> list[Argument]:
        return [
            self._program,
            self.connection,
            *(["--enable-dummy=override", "--disable-system"] if self._dummy else []),
            f"--pidfile={self.rundir / 'ovs-vswitchd.pid'}",
            "-vconsole:off",
            f"--log-file={self._log('ovs-vswitchd')}",
        ]

"""The options shared by all parts; the options of a backend are defined with the backend."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oslo_config import cfg, types

from netplugin.api.errors import reason
from netplugin.api.models import Finding
from netplugin.data_path import installed
from netplugin.spelling import did_you_mean
from netplugin.tuning import intent

#: The UNIX socket that the agent listens on and that the client uses by default.
DEFAULT_SOCKET = "/run/netplugin/agent.sock"

DEFAULT = [
    cfg.StrOpt(
        "state_path",
        default="/var/lib/netplugin",
        help="Directory of the agent's state: the intents of all ports and the task journal "
        "(agent.db). Only the agent can read it. It must survive reboots.",
    ),
    cfg.StrOpt(
        "log_level",
        default="INFO",
        choices=["DEBUG", "INFO", "WARNING", "ERROR"],
        help="Minimum severity of log messages. The log is written to standard error, one JSON object "
        "per line; messages about a port have its port_id. On a terminal it is text for people.",
    ),
]

API = [
    cfg.StrOpt(
        "socket",
        default=DEFAULT_SOCKET,
        help="UNIX socket for callers on this host. The permissions of its file decide who can connect "
        "(see socket_group); no token is needed. Its directory is created if missing. Empty: no "
        "UNIX socket.",
    ),
    cfg.StrOpt(
        "socket_group",
        help="Group whose members may connect to the socket (mode 0660). Unset: only root, or the user "
        "that the agent runs as (mode 0600).",
    ),
    cfg.HostAddressOpt(
        "bind_host",
        help="Address for an additional TCP listener; unset: no TCP. It requires a credential "
        "(client_ca, token_file, or both), and TLS (tls_cert, tls_key) for any address other than "
        "a loopback one; otherwise the agent does not start.",
    ),
    cfg.BoolOpt(
        "insecure_loopback",
        default=False,
        help="Accept unauthenticated TCP calls of every user of this host on a loopback address. For "
        "labs only; a warning is logged at each start. Other addresses are not affected.",
    ),
    cfg.PortOpt("bind_port", default=7071, help="TCP port to listen on; 0: any free port."),
    cfg.StrOpt("tls_cert", help="File with the agent's certificate chain (PEM). Enables TLS."),
    cfg.StrOpt("tls_key", help="File with the certificate's private key (PEM)."),
    cfg.StrOpt(
        "client_ca",
        help="File with the CA certificates (PEM) that client certificates are verified with (mutual "
        "TLS). A client without a valid certificate cannot connect.",
    ),
    cfg.ListOpt(
        "socket_roles",
        default=["plug:*"],
        help="Roles of local users on the socket: <role>:<user>, <role>:@<group>, or <role>:* for all "
        "others. Users and groups are names or numbers; the highest matching role applies. Roles: "
        "read (GET), plug (also ports, networks, domains), operate (everything, including PMD "
        "threads, orphans, quarantine, vf.trusted, vf.trunk, disabling filters, "
        "port_security.roles). Root and the agent's own user have operate.",
    ),
    cfg.ListOpt(
        "cert_roles",
        default=["operate:*"],
        help="Roles of client certificates: <role>:<name>, where name is the common name or an "
        "alternative name (DNS, URI or email), or <role>:* for all others. The highest matching "
        "role applies. A certificate without a role is refused.",
    ),
    cfg.StrOpt(
        "token_file",
        help="File with bearer tokens, one per line: <role>:<name> <token>, where name appears in the "
        "audit log, or just <token>, which has the role operate. # starts a comment. Like "
        "certificates, the file is read again when it changes and on SIGHUP. Once set, every call "
        "over TCP needs a token, except /healthz and /readyz. The file must not be readable by "
        "others.",
    ),
    cfg.StrOpt(
        "audit_log",
        help="File for the audit log: one JSON object per line for each call that changes something "
        "and each call that is refused. It may be moved at any time (logrotate). Unset: the "
        "entries go to the agent's log.",
    ),
    cfg.IntOpt(
        "changes_per_second",
        default=1000,
        min=1,
        help="Maximum rate of modifying calls per credential and second, with bursts of up to twice as "
        "many. Calls above it fail with `overloaded`.",
    ),
    cfg.IntOpt(
        "calls_at_once",
        default=2048,
        min=1,
        help="Maximum number of concurrent calls per credential. Calls above it fail with `overloaded`.",
    ),
    cfg.IntOpt(
        "max_waiting",
        default=4096,
        min=1,
        help="Maximum number of queued port operations per backend. More fail with `overloaded`.",
    ),
    cfg.IntOpt(
        "max_connections",
        default=512,
        min=1,
        help="Maximum number of connections, including those in a TLS handshake. A further connection "
        "closes the one that has been idle for longest; if none is idle, it gets status 503.",
    ),
    cfg.IntOpt(
        "header_timeout",
        default=10,
        min=1,
        help="Seconds for the TLS handshake of a new connection, and again for the headers of each request.",
    ),
    cfg.IntOpt(
        "body_timeout",
        default=30,
        min=1,
        help="Seconds for a client to send the body of a request, and to read the response.",
    ),
    cfg.IntOpt(
        "idle_timeout",
        default=75,
        min=1,
        help="Seconds that an idle connection is kept open between requests.",
    ),
    cfg.IntOpt(
        "max_waiting_reads",
        default=64,
        min=1,
        help="Maximum number of requests queued per backend that read the whole host (/v1/host/checks, "
        "/v1/vfs, /v1/reconcile, and changes of VXLAN networks). Requests above it fail with "
        "`overloaded`. They are scheduled alternately with port operations.",
    ),
]

TASKS = [
    cfg.ListOpt(
        "callback_allow",
        default=[],
        help="Allowed callback URLs of asynchronous calls (header taskuuid), as prefixes such as "
        "https://manager.example.org:8080/callbacks/. Scheme, host and port must match, and the "
        "path must begin with the path of the prefix. Empty: asynchronous calls are refused.",
    ),
    cfg.IntOpt(
        "expire_after",
        default=86400,
        min=1,
        help="Seconds after which an undeliverable result is discarded, and after which a delivered "
        "task is deleted.",
    ),
    cfg.IntOpt(
        "callback_timeout",
        default=10,
        min=1,
        help="Total seconds for one delivery of a result, from the connection to the status of the "
        "response, whose body is not read.",
    ),
    cfg.IntOpt(
        "max_tasks",
        default=100_000,
        min=1,
        help="Maximum number of asynchronous calls in the journal. The oldest finished ones are "
        "deleted to make room; if none is finished, a new call fails with `overloaded`.",
    ),
    cfg.IntOpt(
        "max_bytes",
        default=256 << 20,
        min=1 << 20,
        help="Maximum size of the journal in bytes: bodies of pending calls and results. If it is "
        "reached, the same applies as for max_tasks.",
    ),
    cfg.StrOpt(
        "callback_ca",
        help="File with CA certificates (PEM) for https callback URLs; unset: the system's CA certificates.",
    ),
    cfg.BoolOpt(
        "callback_insecure_http",
        default=False,
        help="Allow http:// prefixes in callback_allow. Results are then sent unencrypted, to an "
        "unauthenticated receiver. Without this option the agent does not start with such a "
        "prefix.",
    ),
    cfg.StrOpt(
        "callback_secret",
        help="File with a key of at least 16 bytes for signing results: the header "
        "X-Netplugin-Signature is sha256= and the HMAC-SHA256 of the taskuuid, a newline and the "
        "body. The file must not be readable by others.",
    ),
    cfg.StrOpt(
        "callback_cert",
        help="File with the client certificate (PEM) for https callback URLs.",
    ),
    cfg.StrOpt("callback_key", help="File with the private key of callback_cert (PEM)."),
]

AGENT = [
    cfg.ListOpt(
        "enabled_backends",
        default=["dpdkvhostuser", "linuxbridge"],
        help="Backends to load, by name in the entry point group netplugin.backends. GET /v1/backends "
        "reports those that cannot be loaded; the others are not affected.",
    ),
    cfg.StrOpt(
        "teaming_backend",
        default="",
        help="Backend of the standby virtio NIC for ports with vf.teaming, which the VM uses while the "
        "VF is detached: linuxbridge or dpdkvhostuser. It must reach the same physical networks. "
        "Empty: vf.teaming is refused.",
    ),
    cfg.ListOpt(
        "service_devices",
        default=[],
        help="Names of devices that are there to be service ports, such as dhcp*, with * and ? as in file "
        "names. Callers with the role plug may use these; any other device takes the role operate, because "
        "it may be that of another VM.",
    ),
    cfg.IntOpt(
        "reconcile_interval",
        default=60,
        min=1,
        help="Seconds between full reconciles, which detect drift on the whole host. Changes that OVS "
        "reports (a changed port, changed flows, a restart) are handled immediately.",
    ),
    cfg.IntOpt(
        "max_events",
        default=10_000,
        min=100,
        max=1_000_000,
        help="Number of events that are kept for GET /v1/events, the newest; some 200 bytes each on disk.",
    ),
    cfg.IntOpt(
        "batch_size",
        default=64,
        min=1,
        max=1024,
        help="Initial number of ports per transaction when many are plugged at once; the size of later "
        "batches depends on the duration of the last one.",
    ),
    cfg.IntOpt(
        "operation_timeout",
        default=30,
        min=1,
        help="Seconds until a port operation has completed or failed, including the time in the queue.",
    ),
]


OVS = [
    cfg.StrOpt(
        "connection",
        default="unix:/run/openvswitch/db.sock",
        help="The Open vSwitch database of this host.",
    ),
    cfg.StrOpt(
        "rundir",
        help="The run directory of OVS, with the pid file and control socket of ovs-vswitchd and the "
        "management sockets of the bridges. Unset: the directory of the UNIX socket in connection, or "
        "else /var/run/openvswitch if the ovs-vswitchd there uses that database.",
    ),
    cfg.StrOpt(
        "control_socket",
        help="The control socket of ovs-vswitchd (its --unixctl). Unset: the one that its pid file in "
        "rundir names, or else the *.ctl in rundir at which an ovs-vswitchd listens.",
    ),
    cfg.StrOpt(
        "vhost_socket_dir",
        default="/run/netplugin/vhost",
        help="Directory of the vhost-user sockets that QEMU creates and OVS connects to. Each port has "
        "a subdirectory, accessible to its qemu_user or to vhost_socket_group. The agent creates it "
        "at start; only root may write to it. The path must not exceed 77 bytes for new ports: "
        "the limit for a UNIX socket is 107 bytes, and a port adds 30. If the option changes, "
        "existing ports keep their paths.",
    ),
    cfg.ListOpt(
        "vhost_socket_roots",
        default=[],
        help="Further directories below which a port may have the vhost-user socket that its "
        "vhost_user_socket names; below vhost_socket_dir it always may. The agent creates missing ones "
        "at start. Only root may write to them.",
    ),
    cfg.StrOpt(
        "vhost_socket_group",
        default="libvirt-qemu",
        help="Group that QEMU runs in. It may create sockets in the directories of ports without qemu_user.",
    ),
    cfg.Opt(
        "bridge_mappings",
        type=types.Dict(types.String()),
        default={},
        help="The bridge of each physical network, such as physnet1:br-phys1,physnet2:br-phys2. A "
        "missing bridge is created with its first port and deleted with its last.",
    ),
    cfg.ListOpt(
        "uplinks",
        default=[],
        help="DPDK uplinks as physical network:device, such as physnet1:0000:03:00.0. The device is "
        "the value of dpdk-devargs in OVS. Several devices of the same network are bonded (see "
        "bonds). An entry with commas must be in double quotes, and then the whole value in "
        "single quotes: '\"physnet1:net_af_packet0,iface=eth1\"'.",
        item_type=types.String(quotes=True),
    ),
    cfg.Opt(
        "bonds",
        type=types.Dict(types.String(choices=["active-backup", "lacp", "balance-slb"])),
        default={},
        help="Bond mode of each physical network with several devices in uplinks, such as "
        "physnet1:lacp. active-backup (default): one link carries all traffic. lacp: balance-tcp, "
        "distributes by addresses and ports; the switch must support LACP (IEEE 802.1AX). "
        "balance-slb: distributes by source MAC and VLAN, without support of the switch.",
    ),
    cfg.Opt(
        "uplink_mtu",
        type=types.Dict(types.Integer(min=576, max=9216)),
        default={},
        help="MTU in bytes of new uplinks by physical network, such as physnet1:9000; default 1500. A "
        "port with a larger network.mtu is refused: changing the MTU stops the NIC for all ports, "
        "so plugging never does it. The agent does not change the MTU of an existing uplink; set "
        "it with ovs-vsctl set Interface <uplink> mtu_request=9000.",
    ),
    cfg.IPOpt(
        "local_ip",
        help="Address of this host as VXLAN tunnel endpoint. It must be configured on the internal "
        "port of a netdev bridge that the operator created with a DPDK NIC: the userspace "
        "datapath of OVS routes tunnels with the kernel's routing table. Unset: no vxlan "
        "networks.",
    ),
    cfg.ListOpt(
        "service_ports",
        default=[],
        help="Names of ports that you added to OVS bridges of netplugin (for DHCP, metadata, a "
        "router). Their traffic is switched like that of an uplink, without filters. Such a "
        "bridge exchanges no frames with ports that neither belong to netplugin nor are listed here; "
        "the internal port of a bridge has the name of the bridge. A port without a tag is a "
        "trunk of all networks of its bridge.",
    ),
    cfg.IntOpt(
        "timeout",
        default=10,
        min=1,
        help="Seconds for ovs-vswitchd to apply one transaction.",
    ),
    cfg.BoolOpt(
        "quiet_datapath_log",
        default=False,
        help="Set the log level of the dpif_netdev module of ovs-vswitchd to WARN. At INFO it logs "
        "every queue of every port whenever a port is added or removed; with a thousand ports "
        "this takes most of the time of a plug. The level stays in effect until ovs-vswitchd "
        "restarts (the agent sets it again) or ovs-appctl vlog/set changes it.",
    ),
]

FLEET = [
    cfg.ListOpt(
        "endpoints",
        default=[],
        help="Members of the etcd that has the desired state of this host, as host:port; it must speak TLS. "
        "Empty: no fleet. It needs the extra: pip install 'netplugin[fleet]'. See docs/fleet.md.",
    ),
    cfg.StrOpt(
        "host",
        help="The name that etcd has for this host, of letters, digits, dots, dashes and underscores. No "
        "other host may have it. Unset: the host name.",
    ),
    cfg.StrOpt("ca", help="File with the CA certificates (PEM) that etcd's certificates are verified with."),
    cfg.StrOpt(
        "cert",
        help="File with the client certificate (PEM), whose common name is the user of etcd. It is read for "
        "each connection, so that a renewed one is used.",
    ),
    cfg.StrOpt("key", help="File with the private key of cert (PEM)."),
    cfg.StrOpt(
        "user",
        help="User of etcd that has a password; cert and key are needed then only if etcd asks for them.",
    ),
    cfg.StrOpt(
        "password_file",
        help="File with the password of user, which nobody else may read. Another password in it is used at "
        "once.",
    ),
    cfg.StrOpt(
        "role",
        default="plug",
        choices=["plug", "operate"],
        help="The role that the writers of the fleet have on this host. With plug the host refuses what "
        "takes operate in the API: physical networks, vf.trusted, disabled filters and so on.",
    ),
]

GROUPS: dict[str, list[Any]] = {
    "DEFAULT": DEFAULT,
    "api": API,
    "agent": AGENT,
    "tasks": TASKS,
    "ovs": OVS,
    "fleet": FLEET,
    intent.GROUP: intent.OPTIONS,
}


def list_opts() -> list[tuple[str, list[Any]]]:
    """All option groups, for oslo-config-generator (entry point group ``oslo.config.opts``)."""
    return list(GROUPS.items())


def register(conf: Any) -> None:
    """Register the shared options with ``conf``."""
    for group, options in GROUPS.items():
        conf.register_opts(options, group=None if group == "DEFAULT" else group)


def load(files: list[Path], argv: list[str] | None = None) -> Any:
    """Read the options from these files into a new ConfigOpts, not the global one.

    Raises: oslo_config.cfg.Error naming the option and the file (``error_text``); ValueError.
    """
    for file in files:
        if file.is_dir():
            raise ValueError(f"--config-file {file} is a directory")
    conf = cfg.ConfigOpts()
    register(conf)
    conf(
        argv or [], project="netplugin", default_config_files=[str(f) for f in files], default_config_dirs=[]
    )
    return conf


_WHERE = re.compile(r"Value for option (\S+) from LocationInfo\(location=<[^>]*>, detail='([^']*)'\)")
_NUMBER = re.compile(r"(invalid literal for int\(\) with base 10|could not convert string to float): ")


def error_text(error: BaseException) -> str:
    """The error's message, without the words of Python and oslo.config's repr of the place of a value."""
    if isinstance(error, OSError):
        text = reason(error)
        return f"{error.filename}: {text}" if error.filename and text == error.strerror else text
    return _NUMBER.sub("no number: ", _WHERE.sub(r"option \1 in \2", str(error)))


def unknown(conf: Any) -> Iterator[Finding]:
    """What the files of ``conf`` set and no option takes, such as a misspelled name.

    Call it when the backends have registered their options. The section of a backend that is installed and
    not enabled is no mistake.
    """
    backends = installed().names
    for file in conf.default_config_files:
        sections: dict[str, dict[str, list[str]]] = {}
        cfg.ConfigParser(file, sections).parse()
        for section, values in sections.items():
            if section != "DEFAULT" and section not in conf:
                if section not in backends:
                    meant = did_you_mean(section, [*GROUPS, *backends])
                    yield _ignored(f"section-{section}", f"{file}: there is no section [{section}]", meant)
                continue
            known = conf if section == "DEFAULT" else conf[section]
            for name in values:
                if name.replace("-", "_") not in known:
                    what = f"{file}: [{section}] has no option {name}"
                    yield _ignored(f"option-{section}-{name}", what, did_you_mean(name, known))


def _ignored(id: str, what: str, meant: str) -> Finding:
    return Finding(
        id=id,
        status="warn",
        found=f"{what}: it is ignored{meant}",
        expected="sections and options that the agent has",
        fix="correct it or take it out, and restart the agent",
    )

"""The options every part shares; a backend's own options stand beside the backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from oslo_config import cfg, types

from netplugin.tuning import host_options

#: Where the agent listens for local callers, and where the client looks for it.
DEFAULT_SOCKET = "/run/netplugin/agent.sock"

DEFAULT = [
    cfg.StrOpt(
        "state_path",
        default="/var/lib/netplugin",
        help="Directory of the agent's own state: the intents of all ports and the task journal "
        "(agent.db). Readable by the agent alone. Keep it across reboots.",
    ),
    cfg.StrOpt(
        "log_level",
        default="INFO",
        choices=["DEBUG", "INFO", "WARNING", "ERROR"],
        help="Least severe level that is logged. The log goes to standard error, one JSON object a "
        "line, each about a port with its port_id.",
    ),
]

API = [
    cfg.StrOpt(
        "socket",
        default=DEFAULT_SOCKET,
        help="UNIX socket for callers on this host. Its file decides who can connect (see "
        "socket_group); they need no token. Its directory is made if there is none. Empty: no UNIX "
        "socket.",
    ),
    cfg.StrOpt(
        "socket_group",
        help="Group whose members may connect to the socket (mode 0660). Unset: root alone, or the "
        "user the agent runs as (mode 0600).",
    ),
    cfg.HostAddressOpt(
        "bind_host",
        help="Address to listen on for TCP as well; unset: no TCP. It needs a credential (client_ca, "
        "token_file, or both), and any address but a loopback one TLS too (tls_cert, tls_key); "
        "without them the agent does not start.",
    ),
    cfg.BoolOpt(
        "insecure_loopback",
        default=False,
        help="Let every user of this host call over TCP on a loopback address without a credential. "
        "For labs; the log warns of it at each start. It changes nothing for other addresses.",
    ),
    cfg.PortOpt("bind_port", default=7071, help="TCP port to listen on; 0 takes a free one."),
    cfg.StrOpt("tls_cert", help="File with the agent's certificate chain (PEM). Turns TLS on."),
    cfg.StrOpt("tls_key", help="File with the certificate's private key (PEM)."),
    cfg.StrOpt(
        "client_ca",
        help="File with the CA certificates (PEM) that client certificates must come from (mutual "
        "TLS). A client without one cannot connect.",
    ),
    cfg.ListOpt(
        "socket_roles",
        default=["plug:*"],
        help="Roles of those who may connect to the socket, as <role>:<user>, <role>:@<group> or "
        "<role>:* for all others; names or numbers; the highest counts. Roles: read (GET), plug "
        "(also ports, networks, domains), operate (all: also PMD threads, orphans, quarantine, "
        "vf.trusted, vf.trunk, filters off, port_security.roles). Root and the agent's own user have "
        "operate.",
    ),
    cfg.ListOpt(
        "cert_roles",
        default=["operate:*"],
        help="Roles of client certificates, as <role>:<name> with the common name or an alternative "
        "name (DNS, URI or email), or <role>:* for all others; the highest counts. A certificate "
        "without a role is refused.",
    ),
    cfg.StrOpt(
        "token_file",
        help="File with bearer tokens, one a line, as <role>:<name> <token> (the name is that of the "
        "audit log), or <token> alone, which has the role operate. # begins a comment. Read again "
        "when it changes, as certificates are, and on SIGHUP. Once set, every call but "
        "/healthz and /readyz over TCP needs one. The file must not be readable by others.",
    ),
    cfg.StrOpt(
        "audit_log",
        help="File for the audit log: a JSON object a line for each call that changes something and "
        "each that was refused. It may be moved away at any time (logrotate). Unset: in the agent's "
        "log.",
    ),
    cfg.IntOpt(
        "changes_per_second",
        default=1000,
        min=1,
        help="Changing calls a second that one credential may send, twice as many at once after a "
        "pause; one more is answered `overloaded`.",
    ),
    cfg.IntOpt(
        "calls_at_once",
        default=2048,
        min=1,
        help="Calls that one credential may have under way; one more is answered `overloaded`.",
    ),
    cfg.IntOpt(
        "max_waiting",
        default=4096,
        min=1,
        help="Operations that may wait at a time; one more is answered `overloaded`.",
    ),
    cfg.IntOpt(
        "max_connections",
        default=512,
        min=1,
        help="Connections at a time, those within a TLS handshake too. One more closes the one that is "
        "idle for longest; if none is idle it is answered 503.",
    ),
    cfg.IntOpt(
        "header_timeout",
        default=10,
        min=1,
        help="Seconds within which a new connection ends its TLS handshake, and again sends its first "
        "request's headers, and a request that has begun its own.",
    ),
    cfg.IntOpt(
        "body_timeout",
        default=30,
        min=1,
        help="Seconds within which a request's body is sent, and an answer is read.",
    ),
    cfg.IntOpt(
        "idle_timeout",
        default=75,
        min=1,
        help="Seconds that a connection is kept between requests.",
    ),
    cfg.IntOpt(
        "max_waiting_reads",
        default=64,
        min=1,
        help="Requests that look at the whole host (/v1/host/checks, /v1/vfs, /v1/reconcile, and "
        "changes of VXLAN networks) that may wait for a backend at a time; one more is answered "
        "`overloaded`. They take turns with port operations.",
    ),
]

TASKS = [
    cfg.ListOpt(
        "callback_allow",
        default=[],
        help="Callback URLs that asynchronous calls (header taskuuid) may name, as prefixes such as "
        "https://manager.example.org:8080/callbacks/. Scheme, host and port must be the same, the "
        "path must begin with the prefix's. Empty: no asynchronous calls are taken.",
    ),
    cfg.IntOpt(
        "expire_after",
        default=86400,
        min=1,
        help="Seconds after which a result that could not be delivered is given up, and after which "
        "a delivered task is forgotten.",
    ),
    cfg.IntOpt(
        "callback_timeout",
        default=10,
        min=1,
        help="Seconds one delivery of a result may take in all, from the connection to the status of "
        "the answer, whose body is not read.",
    ),
    cfg.IntOpt(
        "max_tasks",
        default=100_000,
        min=1,
        help="Asynchronous calls that the journal keeps. The oldest that are finished make room for new "
        "ones; if none is finished, a new one is answered `overloaded`.",
    ),
    cfg.IntOpt(
        "max_bytes",
        default=256 << 20,
        min=1 << 20,
        help="Bytes of asynchronous calls (bodies that are not carried out yet, and results) that the "
        "journal keeps; as with max_tasks.",
    ),
    cfg.StrOpt(
        "callback_ca",
        help="File with CA certificates (PEM) for https callback URLs; unset: the system's.",
    ),
    cfg.BoolOpt(
        "callback_insecure_http",
        default=False,
        help="Let callback_allow have http:// prefixes too: results then go in the clear, and to "
        "whoever answers there. Without it the agent does not start with such a prefix.",
    ),
    cfg.StrOpt(
        "callback_secret",
        help="File with a key of at least 16 bytes that results are signed with: the header "
        "X-Netplugin-Signature has sha256= and the HMAC-SHA256 of the taskuuid, a newline and the "
        "body. The file must not be readable by others.",
    ),
    cfg.StrOpt(
        "callback_cert",
        help="File with a client certificate (PEM) that is shown to https callback URLs.",
    ),
    cfg.StrOpt("callback_key", help="File with the private key of callback_cert (PEM)."),
]

AGENT = [
    cfg.ListOpt(
        "enabled_backends",
        default=["dpdkvhostuser", "linuxbridge"],
        help="Backends to load, by their names in the entry point group netplugin.backends. One that "
        "cannot be loaded is reported by GET /v1/backends and hurts no other.",
    ),
    cfg.StrOpt(
        "teaming_backend",
        default="",
        help="The backend of the virtio NIC that stands beside a VF when a port asks for vf.teaming "
        "and that its VM uses while the VF is away: linuxbridge or dpdkvhostuser. It must reach the "
        "same physical networks. Empty: vf.teaming is refused.",
    ),
    cfg.IntOpt(
        "reconcile_interval",
        default=60,
        min=1,
        help="Seconds between looks at the whole host for drift. What OVS tells by itself (a changed "
        "port, a restart) is acted on at once and does not wait for this.",
    ),
    cfg.IntOpt(
        "batch_size",
        default=64,
        min=1,
        max=1024,
        help="Ports that first share one transaction when many are plugged at once; later batches "
        "are sized by the time the last one took.",
    ),
    cfg.IntOpt(
        "operation_timeout",
        default=30,
        min=1,
        help="Seconds within which a port operation is done or answered with an error, the waiting "
        "for its turn included.",
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
        default="/run/openvswitch",
        help="OVS's run directory, where vswitchd keeps its pid file, its control socket and the "
        "bridges' management sockets.",
    ),
    cfg.StrOpt(
        "vhost_socket_dir",
        default="/run/netplugin/vhost",
        help="Directory of the vhost-user sockets that QEMU makes and OVS connects to: each port has "
        "a directory of its own in it, for its qemu_user or for vhost_socket_group. The agent makes "
        "it at start, and only root may write to it. New ports need one of 77 bytes at most: a UNIX socket's "
        "path has 107, and a port's adds 30. If it is changed, ports that are there keep their paths.",
    ),
    cfg.StrOpt(
        "vhost_socket_group",
        default="libvirt-qemu",
        help="The group QEMU runs in. It may make sockets in the directories of the ports that name "
        "no qemu_user.",
    ),
    cfg.Opt(
        "bridge_mappings",
        type=types.Dict(types.String()),
        default={},
        help="The bridge of each physical network, like physnet1:br-phys1,physnet2:br-phys2. A bridge "
        "that is not there is made when its first port comes, and goes with its last.",
    ),
    cfg.ListOpt(
        "uplinks",
        default=[],
        help="DPDK uplinks as physical network:device, like physnet1:0000:03:00.0. The device is what "
        "OVS takes as dpdk-devargs. A network that stands there several times has its devices bonded "
        "(see bonds). An entry that has commas stands in double quotes, and then the whole value in "
        "single ones: '\"physnet1:net_af_packet0,iface=eth1\"'.",
        item_type=types.String(quotes=True),
    ),
    cfg.Opt(
        "bonds",
        type=types.Dict(types.String(choices=["active-backup", "lacp", "balance-slb"])),
        default={},
        help="How the devices of a physical network that has several in uplinks are bonded, like "
        "physnet1:lacp. active-backup (what a network has that is not named here): one link carries "
        "all, the others wait. lacp: balance-tcp, spread by addresses and ports; the switch must do "
        "LACP (IEEE 802.1AX). balance-slb: spread by source MAC and VLAN, without the switch's help.",
    ),
    cfg.Opt(
        "uplink_mtu",
        type=types.Dict(types.Integer(min=576, max=9216)),
        default={},
        help="MTU that the uplinks of a physical network are made with, like physnet1:9000; 1500 for "
        "a network that is not named here. A port with a larger network.mtu is refused: a change of "
        "MTU stops the NIC for all, so no port ever makes one. The MTU of an uplink that is there is "
        "yours: the agent leaves it as it is (ovs-vsctl set Interface <uplink> mtu_request=9000).",
    ),
    cfg.IPOpt(
        "local_ip",
        help="This host's address for VXLAN tunnels, which its peers send to. It is on the internal "
        "port of a netdev bridge that the operator made for it, with a DPDK NIC: OVS's userspace "
        "datapath routes the tunnels by the kernel's table. Without it there are no vxlan networks.",
    ),
    cfg.ListOpt(
        "service_ports",
        default=[],
        help="Ports that you have added yourself to OVS bridges that netplugin made (for DHCP, metadata, "
        "a router), by name: what they send is switched like an uplink's, without a filter. Such a "
        "bridge takes nothing from a port that neither is netplugin's nor stands here; the bridge's "
        "own internal port has the bridge's name. A port without a tag is a trunk of all networks of "
        "its bridge.",
    ),
    cfg.IntOpt(
        "timeout",
        default=10,
        min=1,
        help="Seconds vswitchd is given to carry out one transaction.",
    ),
    cfg.BoolOpt(
        "quiet_datapath_log",
        default=False,
        help="Set the log level of vswitchd's dpif_netdev module to WARN. At INFO it logs every queue "
        "of every port whenever a port comes or goes: with a thousand ports that is most of the time "
        "a plug takes. It stays set until vswitchd restarts (the agent sets it again) or "
        "ovs-appctl vlog/set changes it.",
    ),
]

GROUPS: dict[str, list[Any]] = {
    "DEFAULT": DEFAULT,
    "api": API,
    "agent": AGENT,
    "tasks": TASKS,
    "ovs": OVS,
    host_options.GROUP: host_options.OPTIONS,
}


def list_opts() -> list[tuple[str, list[Any]]]:
    """For oslo-config-generator (entry point group ``oslo.config.opts``)."""
    return list(GROUPS.items())


def register(conf: Any) -> None:
    """Make the shared options known to ``conf``."""
    for group, options in GROUPS.items():
        conf.register_opts(options, group=None if group == "DEFAULT" else group)


def load(files: list[Path], argv: list[str] | None = None) -> Any:
    """Options read from these files; the registry is the caller's own, not the global one.

    Raises: oslo_config.cfg.Error naming the option and the file.
    """
    conf = cfg.ConfigOpts()
    register(conf)
    conf(argv or [], project="netplugin", default_config_files=[str(f) for f in files],
         default_config_dirs=[])  # fmt: skip
    return conf

"""Generates VPP's startup.conf from CPUs, NICs and queues (FD.io's startup.conf reference)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from netplugin.host import cpus
from netplugin_zeroloss.vnf.contract import VnfCores

#: Interface name of a DPDK port.
INTERFACE = "port{number}"
#: Buffers in addition to those in rings: in the graph, and in per-worker caches.
_SPARE_BUFFERS = 16384


@dataclass(frozen=True, slots=True)
class StartupConf:
    """Values of the file. ``directory`` contains the sockets and is VPP's runtime-dir."""

    directory: str
    cores: VnfCores
    #: PCI addresses for DPDK, in port order.
    nics: Sequence[str] = ()
    queues: int = 1
    ring: int = 1024
    #: Plug-ins besides dpdk, which is enabled if there are NICs.
    plugins: Sequence[str] = ()
    plugin_path: str | None = None
    hugepages: bool = True
    mtu: int = 1500

    @property
    def api_socket(self) -> str:
        return f"{self.directory}/api.sock"

    @property
    def stats_socket(self) -> str:
        return f"{self.directory}/stats.sock"

    def text(self) -> str:
        """Return the file. The order of sections has no meaning for VPP."""
        ports = max(2, len(self.nics))
        buffers = 2 * ports * self.queues * self.ring + _SPARE_BUFFERS
        page = [] if self.hugepages else ["page-size default"]
        return "".join(
            [
                _section(
                    "unix",
                    "nodaemon",
                    f"runtime-dir {self.directory}",
                    f"cli-listen {self.directory}/cli.sock",
                    f"log {self.directory}/vpp.log",
                ),
                _section("socksvr", f"socket-name {self.api_socket}"),
                _section("statseg", f"socket-name {self.stats_socket}"),
                _section("cpu", *self._cpu()),
                _section("buffers", f"buffers-per-numa {buffers}", *page),
                _section("plugins", *self._plugins()),
                *([_section("dpdk", *self._dpdk())] if self.nics else []),
            ]
        )

    def _cpu(self) -> list[str]:
        lines = [] if self.cores.main is None else [f"main-core {self.cores.main}"]
        if self.cores.workers:
            lines.append(f"corelist-workers {cpus.format_list(self.cores.workers)}")
        return lines

    def _plugins(self) -> list[str]:
        names = [*(["dpdk"] if self.nics else []), *self.plugins]
        path = [f"path {self.plugin_path}"] if self.plugin_path else []
        enabled = [f"plugin {name}_plugin.so {{ enable }}" for name in names]
        return [*path, "plugin default { disable }", *enabled]

    def _dpdk(self) -> list[str]:
        queues = f"num-rx-queues {self.queues} num-tx-queues {self.queues}"
        rings = f"num-rx-desc {self.ring} num-tx-desc {self.ring}"
        return [
            # One buffer per frame is faster; jumbo frames need several.
            *(["no-multi-seg", "no-tx-checksum-offload"] if self.mtu <= 1500 else []),
            # With the default of 10 s, frames missed by the NIC would be counted in a later trial.
            "stats-poll-interval 0.1",
            *([] if self.hugepages else ["no-hugetlb"]),
            f"dev default {{ {queues} {rings} }}",
            *(
                f"dev {nic} {{ name {INTERFACE.format(number=number)} }}"
                for number, nic in enumerate(self.nics)
            ),
        ]


def _section(name: str, *lines: str) -> str:
    if not lines:
        return ""
    return f"{name} {{\n" + "".join(f"  {line}\n" for line in lines) + "}\n"

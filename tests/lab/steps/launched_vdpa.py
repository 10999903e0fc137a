"""``netplugin-agent`` that stops at each step, with vdpa on model NICs: ``main`` for `tests.lab.preloaded`.

A model forgets what was written to it when its agent ends, as VFs do in a reboot.
"""

from __future__ import annotations

from typing import Any

from drivers.vdpa.driver import Vdpa
from tests.functional.test_vdpa_ovs import WiredPf
from tests.lab.steps import launched
from tests.unit.drivers.sriov.model import Model

#: The near ends of the wires that DPDK has as VFs.
WIRES = tuple(f"npwire{number}" for number in range(5))


def _nic(number: int) -> WiredPf:
    nic = WiredPf(f"0000:0{number + 3}:00.0", f"eth{number + 3}", "physnet1", total=0, vf_driver="mlx5_core")
    nic.device = f"net_af_packet{number},iface={WIRES[number]}"
    nic.make_vfs(1)
    return nic


def main() -> int:
    real = Vdpa.__init__

    def on_models(self: Vdpa, conf: Any, host: Any) -> None:
        real(self, conf, host, kernel=Model(*map(_nic, range(len(WIRES)))))

    Vdpa.__init__ = on_models  # type: ignore[assignment,method-assign]
    return launched.main()

"""State files of network managers, as systemd-networkd 252 and NetworkManager write them."""

from __future__ import annotations

from pathlib import Path

from netplugin.host.link_managers import managers

NETWORKD = "# This is private data. Do not parse.\nADMIN_STATE={}\nOPER_STATE=degraded\n"
DEVICES = {2: "npb1", 3: "npt1", 4: "npt2", 5: "npt3"}


def write(run: Path, name: str, text: str) -> None:
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    (run / name).write_text(text)


def test_devices_that_a_manager_configures_are_found(tmp_path: Path) -> None:
    assert managers(DEVICES, tmp_path) == {}
    configured = NETWORKD.format("configuring") + "NETWORK_FILE=/run/systemd/network/10-all.network\nDNS=\n"
    write(tmp_path, "systemd/netif/links/2", configured)
    write(tmp_path, "systemd/netif/links/3", NETWORKD.format("unmanaged"))
    write(tmp_path, "systemd/netif/links/9", configured)
    write(tmp_path, "NetworkManager/devices/4", "[device]\nmanaged=true\nnm-owned=0\n")
    write(tmp_path, "NetworkManager/devices/5", "[device]\nmanaged=false\n")
    assert managers(DEVICES, tmp_path) == {"systemd-networkd": ("npb1",), "NetworkManager": ("npt2",)}

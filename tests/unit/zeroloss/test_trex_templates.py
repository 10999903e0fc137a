"""The configuration of TRex for users: what zeroloss relies on is in it. Profiles: test_trex_stl.py."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from netplugin_zeroloss.generators.choose import TrexStl

FILE = Path(__file__).resolve().parents[3] / "tools" / "trex" / "trex_cfg.yaml"


def test_the_configuration() -> None:
    """TRex wants a list of one, and a pair of threads' ports; the client wants its ports."""
    configs: list[dict[str, Any]] = yaml.safe_load(FILE.read_text())
    [config] = configs
    assert config["version"] == 2 and config["port_limit"] == len(config["interfaces"]) == 2
    assert len(config["port_info"]) == 2
    assert (config["zmq_rpc_port"], config["zmq_pub_port"]) == (
        TrexStl().sync_port,
        TrexStl().async_port,
    )
    platform = config["platform"]
    [pair] = platform["dual_if"]
    threads = [platform["master_thread_id"], platform["latency_thread_id"], *pair["threads"]]
    assert len(pair["threads"]) == config["c"] and len(set(threads)) == len(threads)
    # What one port sends goes to the other.
    one, other = config["port_info"]
    assert (one["dest_mac"], other["dest_mac"]) == (other["src_mac"], one["src_mac"])


def test_the_other_form_in_its_comments() -> None:
    """With the comments taken away it is a configuration for one core."""
    text = FILE.read_text()
    comment = text[text.index("  # low_end: true") :]
    [config] = yaml.safe_load("- version: 2\n" + re.sub(r"^  # ", "  ", comment, flags=re.MULTILINE))
    assert config["low_end"] is True and config["low_end_core"] == 1
    assert all(device.startswith("--vdev=net_af_packet") for device in config["interfaces"])

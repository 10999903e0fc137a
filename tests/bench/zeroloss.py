"""Figures of zeroloss: a device whose limit is known is made of the kernel's token bucket, and searched for.

    python -m tests.lab.sandbox -- python -m tests.bench.zeroloss [--pps 20000] [--repeats 5]

Frames of a veth are redirected to another one behind a token bucket (tc-tbf): so many frames a second
pass, a few wait, and what does not fit is lost. Exit status 1 if the median is not within 5 %.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from netplugin_zeroloss.journal import read_run

from tests.lab.processes import run
from tests.lab.wires import Wires, wires

PROGRAM = Path(__file__).resolve().parents[2] / "tools/trex/zeroloss.py"
#: What the bucket counts of a frame of 64 bytes: the kernel has no FCS.
FRAME_BYTES = 60
#: Frames that may wait. More than these fill the sender's own socket buffer, and it slows down: veth
#: keeps the sender as their owner. Then the generator is the limit, as zeroloss says too.
QUEUE = 160
WITHIN = 0.05


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.zeroloss")
    parser.add_argument("--pps", type=int, default=20_000, help="what the device forwards")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--final-duration", type=float, default=5.0, help="seconds")
    options = parser.parse_args()
    with wires() as wired, tempfile.TemporaryDirectory() as folder:
        cap(wired, options.pps)
        result = searched(Path(folder), wired, options)
    return report(result, options.pps)


def cap(wired: Wires, pps: int) -> None:
    """All that comes in at the first NIC goes out at the second, at this rate at most."""
    one, other = wired.nics
    bits, burst = pps * FRAME_BYTES * 8, FRAME_BYTES * 32
    run(["tc", "qdisc", "add", "dev", one, "handle", "ffff:", "ingress"])
    run(
        [
            "tc",
            "filter",
            "add",
            "dev",
            one,
            "parent",
            "ffff:",
            "protocol",
            "all",
            "u32",
            "match",
            "u32",
            "0",
            "0",
            "action",
            "mirred",
            "egress",
            "redirect",
            "dev",
            other,
        ]
    )
    run(
        [
            "tc",
            "qdisc",
            "add",
            "dev",
            other,
            "root",
            "tbf",
            "rate",
            f"{bits}bit",
            "burst",
            str(burst),
            "limit",
            str(QUEUE * FRAME_BYTES + burst),
        ]
    )


def searched(folder: Path, wired: Wires, options: argparse.Namespace) -> dict[str, Any]:
    """The result of the only cell."""
    one, other = wired.ends
    description = {
        "name": "known",
        "generator": {
            "type": "tcpreplay",
            "netns": wired.netns,
            "paths": [{"send": one, "receive": other}],
        },
        "search": {
            "final_duration": options.final_duration,
            "precision": 0.02,
            "buffer_packets": QUEUE,
            "repeats": options.repeats,
            "line_rate_pps": 3 * options.pps,
        },
        "matrix": {"backends": ["token-bucket"], "without_pmd": ["token-bucket"], "flows": [1]},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(description))
    subprocess.run(
        [sys.executable, str(PROGRAM), "matrix", str(path), "--folder", str(folder / "run")],
        stdout=subprocess.DEVNULL,
        check=False,
        timeout=3600,
    )
    (record,) = read_run(folder / "run").records
    if record.result is None:
        raise SystemExit(f"no result: {record.error}")
    return dict(record.result)


def report(result: dict[str, Any], pps: int) -> int:
    repeats = result["repeats"]
    answers = [answer for answer in repeats["answers_pps"] if answer is not None]
    print(f"device    {pps} pps (tc-tbf, {QUEUE} frames of queue)")
    print(f"verdicts  {repeats['verdicts']}")
    print(f"answers   {', '.join(f'{answer:.0f}' for answer in answers)} pps")
    print(
        f"cost      {result['trials']} trials ({result['invalid_trials']} invalid),"
        f" {result['traffic_s']:.0f} s of traffic, {result['wall_s']:.0f} s in all"
    )
    if not answers:
        print("no answer")
        return 1
    error = statistics.median(answers) / pps - 1
    print(f"median    {statistics.median(answers):.0f} pps, {error:+.1%} of the device")
    return 0 if abs(error) <= WITHIN else 1


if __name__ == "__main__":
    sys.exit(main())

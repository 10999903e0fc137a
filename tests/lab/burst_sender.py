"""A program for the generator ``exec``: sends frames in bursts on wires, in real time and exactly counted.

python -m tests.lab.burst_sender NETNS SEND,RECEIVE,SOURCE_MAC,DESTINATION_MAC ...
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Any

from netplugin_zeroloss.generators.contract import at_rest
from netplugin_zeroloss.generators.frames import Frames, frames_of
from netplugin_zeroloss.generators.wire import MARKER_BYTES, Wire
from netplugin_zeroloss.values import TrialRequest

from tests.lab.namespaces import entered


def trial(netns: str, ways: Sequence[Sequence[str]], asked: dict[str, Any]) -> dict[str, Any]:
    request = TrialRequest(
        asked["rate_pps"],
        asked["duration_s"],
        frame_size=asked["frame_size"],
        flows=asked["flows"],
        burst=asked.get("burst", 1),
    )
    each = round(request.packets / len(ways))
    period = request.burst * len(ways) / request.rate_pps
    with ExitStack() as stack:
        wire = stack.enter_context(closing(Wire(netns)))
        legs = []
        for number, (send, receive, source, destination) in enumerate(ways):
            marker = os.urandom(MARKER_BYTES)
            frames = Frames(source_mac=source, destination_mac=destination).in_direction(number)
            sent = stack.enter_context(closing(wire.count(wire.interface(send), marker, outgoing=True)))
            came = stack.enter_context(closing(wire.count(wire.interface(receive), marker, outgoing=False)))
            with entered(netns):
                outbox = stack.enter_context(socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
                outbox.bind((send, 0))
            legs.append((outbox, list(frames_of(frames, request, marker, 1 << 16)), sent, came))
        begun = time.monotonic()
        for first in range(0, each, request.burst):
            # The pace is the load that is offered.
            time.sleep(max(0.0, begun + first / request.burst * period - time.monotonic()))
            for outbox, frames_to_send, _, _ in legs:
                for n in range(first, min(first + request.burst, each)):
                    outbox.send(frames_to_send[n % len(frames_to_send)])
        elapsed = max(time.monotonic() - begun, each / request.burst * period)
        counted = [sent.read() for _, _, sent, _ in legs]
        received, settled = at_rest(
            lambda: tuple(came.read() for _, _, _, came in legs), lambda found: sum(found) >= sum(counted)
        )
    return {
        "tx_packets": sum(counted),
        "rx_packets": sum(received),
        "elapsed_s": elapsed,
        "settled": settled,
        "directions": [
            {"tx_packets": tx, "rx_packets": rx} for tx, rx in zip(counted, received, strict=True)
        ],
    }


def main() -> None:
    netns, *ways = sys.argv[1:]
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["op"] == "bye":
            return
        answer: dict[str, Any] = {"ok": True, "name": "burst sender", "bursts": True, "can_abort": False}
        if asked["op"] == "trial":
            answer = trial(netns, [way.split(",") for way in ways], asked)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

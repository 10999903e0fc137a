"""A profile of TRex: UDP frames of one size in many flows, which differ by source address.

    trex> start -f stl_udp_flows.py -m 1mpps -p 0 1 -t --size 64 --flows 1024

The addresses are those of RFC 2544 for benchmarks (198.18.0.0/15). MAC addresses are those of TRex's
configuration. `zeroloss` sends the same frames without this file; begin here to send others.
"""

import argparse
from ipaddress import IPv4Address

from trex.stl.api import (
    IP,
    UDP,
    Ether,
    STLPktBuilder,
    STLStream,
    STLTXCont,
    STLVmFixIpv4,
    STLVmFlowVar,
    STLVmWrFlowVar,
)

SIDES = ("198.18.0.1", "198.19.0.1")
#: The frame check sequence, which the NIC adds.
FCS = 4


class UdpFlows:
    def get_streams(self, direction, tunables, **_):
        """``direction`` is 0 on even ports and 1 on odd ones: what one sends the other receives."""
        parser = argparse.ArgumentParser()
        parser.add_argument("--size", type=int, default=64, help="bytes, with the FCS")
        parser.add_argument("--flows", type=int, default=1024)
        options = parser.parse_args(tunables)
        source, destination = SIDES[direction], SIDES[1 - direction]
        # No UDP checksum, so that a device may change addresses and need not mend it.
        packet = Ether() / IP(src=source, dst=destination) / UDP(sport=1024, dport=9, chksum=0)
        packet = packet / (b"\0" * (options.size - FCS - len(packet)))
        first = int(IPv4Address(source))
        engine = [
            STLVmFlowVar(
                "flow", min_value=first, max_value=first + options.flows - 1, size=4, op="inc"
            ),
            STLVmWrFlowVar("flow", pkt_offset="IP.src"),
            STLVmFixIpv4(offset="IP"),
        ]
        return [STLStream(packet=STLPktBuilder(pkt=packet, vm=engine), mode=STLTXCont(pps=1))]


def register():
    return UdpFlows()

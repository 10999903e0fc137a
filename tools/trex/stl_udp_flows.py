"""TRex profile: UDP frames of one size in many flows that differ by source address.


    trex> start -f stl_udp_flows.py -m 1mpps -p 0 1 -t --size 64 --flows 1024

Addresses are from the benchmarking network of RFC 2544 (198.18.0.0/15). MAC addresses are those of the
TRex configuration. `zeroloss` sends the same frames without this file; use it as a template for others.
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
#: Bytes of the FCS, which the NIC adds.
FCS = 4


class UdpFlows:
    #: Bytes with FCS, and frames per round; None: the size that the options have.
    mix = None

    def get_streams(self, direction, tunables, **_):
        """``direction`` is 0 on even ports and 1 on odd ones, which receive each other's frames."""
        parser = argparse.ArgumentParser()
        parser.add_argument("--size", type=int, default=64, help="bytes, with the FCS")
        parser.add_argument("--flows", type=int, default=1024)
        options = parser.parse_args(tunables)
        sizes = self.mix or ((options.size, 1),)
        return [self.stream(direction, options.flows, size, share) for size, share in sizes]

    def stream(self, direction, flows, size, share):
        """The multiplier of the start command scales the shares to rates."""
        source, destination = SIDES[direction], SIDES[1 - direction]
        # No UDP checksum, so that a device may rewrite addresses without updating it.
        packet = Ether() / IP(src=source, dst=destination) / UDP(sport=1024, dport=9, chksum=0)
        packet = packet / (b"\0" * (size - FCS - len(packet)))
        first = int(IPv4Address(source))
        engine = [
            STLVmFlowVar("flow", min_value=first, max_value=first + flows - 1, size=4, op="inc"),
            STLVmWrFlowVar("flow", pkt_offset="IP.src"),
            STLVmFixIpv4(offset="IP"),
        ]
        return STLStream(packet=STLPktBuilder(pkt=packet, vm=engine), mode=STLTXCont(pps=share))


def register():
    return UdpFlows()

"""TRex profile: IMIX_v4_1 of FD.io CSIT, 28 x 64, 16 x 570 and 4 x 1518 bytes.


    trex> start -f stl_imix.py -m 500kpps -p 0 1 -t --flows 1024

The rate is that of all three sizes together; the mean frame is 353.8 bytes with FCS. `zeroloss` sends
the same with `--mix imix`; use this file as a template for other mixes.
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

#: Bytes with FCS, which the NIC adds, and frames per round.
MIX = ((64, 28), (570, 16), (1518, 4))
FCS = 4
SIDES = ("198.18.0.1", "198.19.0.1")


class Imix:
    def get_streams(self, direction, tunables, **_):
        """``direction`` is 0 on even ports and 1 on odd ones, which receive each other's frames."""
        parser = argparse.ArgumentParser()
        parser.add_argument("--flows", type=int, default=1024)
        options = parser.parse_args(tunables)
        return [self.stream(direction, options.flows, size, share) for size, share in MIX]

    def stream(self, direction, flows, size, share):
        """The multiplier of the start command scales the shares to rates."""
        source, destination = SIDES[direction], SIDES[1 - direction]
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
    return Imix()

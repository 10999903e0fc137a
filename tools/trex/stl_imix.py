"""TRex profile: IMIX_v4_1 of FD.io CSIT, 28 x 64, 16 x 570 and 4 x 1518 bytes.


    trex> start -f stl_imix.py -m 500kpps -p 0 1 -t --flows 1024

The rate is that of all three sizes together; the mean frame is 353.8 bytes with FCS. `zeroloss` sends
the same with `--mix imix`; use this file, with stl_udp_flows.py next to it, as a template for other mixes.
"""

from stl_udp_flows import UdpFlows


class Imix(UdpFlows):
    mix = ((64, 28), (570, 16), (1518, 4))


def register():
    return Imix()

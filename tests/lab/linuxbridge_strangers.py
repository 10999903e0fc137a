"""What others have on a host with Linux bridges, which the agent must leave as it is."""

from __future__ import annotations

#: Of each kind that the agent makes, one.
THEIRS = (
    "ip link add theirs-br type bridge",
    "ip link add theirs0 type veth peer theirs1",
    "ip link set theirs0 master theirs-br up",
    "ip link add theirs-vx type vxlan id 7777 dstport 4789 local 10.9.0.1",
    "bridge fdb append 00:00:00:00:00:00 dev theirs-vx dst 10.9.0.7",
    "ip link add theirs-ifb type ifb",
    "tc qdisc add dev theirs-ifb root tbf rate 10mbit burst 20kb latency 10ms",
    "tc qdisc add dev theirs0 ingress",
    "ip tuntap add theirs-tap mode tap",
    "nft add table bridge theirs",
    "nft add chain bridge theirs filter { type filter hook prerouting priority 0; }",
    "nft add rule bridge theirs filter ether type 0x9999 drop",
)

"""Linux bridges: a persistent tap for each NIC on a bridge for each segment, filtered by nftables."""

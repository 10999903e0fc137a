"""Low-level access to the host: OVSDB, OpenFlow, netlink, tc, nftables, processes."""

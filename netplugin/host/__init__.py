"""The thin primitives that touch a host: OVSDB, OpenFlow, netlink, nftables, processes."""

"""What the backends on OVS-DPDK share: rows, filters, bridges, reading and writing. Not a backend."""

"""Code shared by the OVS-DPDK backends: rows, filters, bridges, reading and writing. Not a backend."""

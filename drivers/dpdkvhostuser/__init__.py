"""OVS-DPDK and vhost-user: a ``dpdkvhostuserclient`` port for each NIC; OVS connects, QEMU listens."""

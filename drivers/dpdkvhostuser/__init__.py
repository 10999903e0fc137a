"""The backend dpdkvhostuser: one ``dpdkvhostuserclient`` port of OVS-DPDK per NIC (QEMU listens)."""

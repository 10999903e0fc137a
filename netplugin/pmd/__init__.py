"""The PMD threads of OVS-DPDK: how busy they are, which queues would be better where, and setting it."""

"""PMD threads of OVS-DPDK: read their load, propose an rxq assignment, and apply settings."""

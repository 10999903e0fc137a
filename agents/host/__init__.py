"""The host around the ports: its daemons, CPUs, PMD threads, VFs and domains, and what is wrong with them."""

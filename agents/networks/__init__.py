"""VXLAN networks and physical networks: stored, and applied on every backend that they concern."""

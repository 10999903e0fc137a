"""The dpdkvhostuser backend without a host."""

"""The host around the ports."""

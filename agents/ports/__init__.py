"""Ports and networks of a host brought to their desired state: plug, undo, drift."""

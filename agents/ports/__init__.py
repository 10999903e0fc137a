"""Ports and networks of a host brought to what is wanted: plug, undo, drift."""

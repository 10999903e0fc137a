"""Tuning a host for packets: what the machine is, what it should be, and the way from one to the other."""

"""Machines on which programs of a run are started: this one, another host, a VM."""

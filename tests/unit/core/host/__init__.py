"""Tests of netplugin/host, those of Open vSwitch against a real one with dummy devices."""

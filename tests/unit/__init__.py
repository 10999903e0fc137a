"""Tests of single parts, on any machine: no root, no Open vSwitch, no network but loopback."""

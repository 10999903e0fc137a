"""Tests of the vdpa backend without a host."""

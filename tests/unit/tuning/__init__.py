"""Tests of tuning a host, on machines that are data."""

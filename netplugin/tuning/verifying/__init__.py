"""Measure the effect of tuning: wake-up latency of CPUs, and packet rate between two CPUs."""

"""Metrics and events."""

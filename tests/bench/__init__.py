"""Figures: how fast, next to what."""

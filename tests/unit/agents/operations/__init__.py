"""Calls about ports, through the whole agent."""

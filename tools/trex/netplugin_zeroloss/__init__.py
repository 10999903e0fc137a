"""The acceptance library: measures the highest frame rate that a backend forwards without loss.

Agents and drivers do not import it. The command is ``tools/trex/zeroloss.py``.
"""

"""The acceptance library: how many frames a second a backend forwards without losing one.

Agents and drivers do not import it. The command is ``tools/trex/zeroloss.py``.
"""

"""The HTTP API of the agent, its guard and its tasks."""

"""The agent."""

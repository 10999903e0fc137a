"""What the agent remembers: one SQLite file."""

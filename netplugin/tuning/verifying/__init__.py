"""The effect of tuning in figures measured here: how late CPUs wake, how many packets two of them pass."""

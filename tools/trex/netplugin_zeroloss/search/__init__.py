"""The search for the highest rate at which a goal is met: one idea a file."""

"""What sends the frames: one contract, and an adapter for each generator."""

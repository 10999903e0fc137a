"""Traffic generators: one contract, and an adapter for each generator."""

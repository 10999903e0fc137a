"""The VM under test: its image, built once and cached, and the domain of each VM that runs on it."""

"""The per-host agent: intents, the converge loop, and the front ends that platforms call."""

"""The agent of a hypervisor: intents, the converge loop, and the HTTP API."""

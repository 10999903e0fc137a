"""How the agent is called: HTTP, who may do what, limits, asynchronous calls."""

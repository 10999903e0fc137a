"""The parts shared by the agent, the backends and the tools: the backend contract and common code."""

"""What the agent, the backends and the tools of netplugin share: the contract and the primitives."""

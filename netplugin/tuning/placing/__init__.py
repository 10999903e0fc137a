"""CPU and memory placement of a VM by the host's plan: choose it, write it to the domain, check it (pure)."""

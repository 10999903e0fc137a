"""Where a VM's threads and memory go on its host, by the host's plan: chosen, written, checked (pure)."""

"""The same figures inside a VM: it is started on an image, placed by the host's plan, and measured by SSH."""

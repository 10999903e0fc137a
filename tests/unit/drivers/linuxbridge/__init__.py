"""The linuxbridge backend on a model of the kernel."""

"""The sriov backend on a model of the kernel."""

"""The core: API values, host, libvirt, PMD threads."""

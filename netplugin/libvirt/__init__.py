"""Domain and interface XML of libvirt: read, completed, written; what a domain needs of its host."""

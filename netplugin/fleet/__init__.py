"""A fleet: what etcd has of each host, and how it is read and written. Shared by writers and agents."""

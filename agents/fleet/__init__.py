"""The desired state of this host from etcd: read, planned (pure), carried out, reported."""

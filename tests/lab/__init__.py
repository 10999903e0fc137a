"""The test lab: real daemons and guests in private namespaces that leave nothing behind."""

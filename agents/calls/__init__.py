"""Calls about ports: each becomes an operation in the queue of the worker of its backend."""

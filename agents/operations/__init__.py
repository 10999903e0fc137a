"""What callers ask of ports: each operation is queued in the worker of its backend and awaited."""

"""What takes an hour, or thousands of ports: run by `tox -e long`."""

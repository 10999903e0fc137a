"""What people see of a run: a table, a picture, a page, and the comparison with another run."""

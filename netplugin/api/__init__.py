"""What callers see: the values of the API, its errors, and a client."""

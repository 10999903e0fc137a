"""What is measured, one question each."""

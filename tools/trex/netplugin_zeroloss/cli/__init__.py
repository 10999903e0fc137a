"""The command ``zeroloss`` and its sub-commands."""

"""The command ``netplugin-zeroloss`` and its sub-commands."""

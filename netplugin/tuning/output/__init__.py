"""A plan for people and for Ansible."""

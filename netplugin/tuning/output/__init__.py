"""Output of a plan as text, JSON and Ansible playbook."""

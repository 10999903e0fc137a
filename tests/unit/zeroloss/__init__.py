"""The acceptance library: judgement, search, generators, command line; nothing is sent."""

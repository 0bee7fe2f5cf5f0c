"""Frameworks that people already use, each in one small file over public names of agent_rl."""

"""Tasksets of verifiers (0.4 and its like) as environments: their prompts, tools and rewards."""

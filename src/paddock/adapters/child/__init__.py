"""Environments that live in child processes under another interpreter (see `paddock.sessions.isolation`).

hosted    our environment classes in front of them: requests and answers are JSON
schemas   types with a schema that the other side wrote
"""

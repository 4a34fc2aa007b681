"""The rules of the wire without any IO: messages, codec, episodes, JSON-RPC, MCP, resume.

Nothing here knows a socket, a loop or a clock, so every rule can be tested in microseconds and
no two transports can disagree about one.
"""

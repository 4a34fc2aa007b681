"""MCP servers as environments: each session has a server, or a conversation with one, of its own."""

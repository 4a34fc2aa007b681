"""The client side: make an instance, act in it over MCP, grade it, end it."""

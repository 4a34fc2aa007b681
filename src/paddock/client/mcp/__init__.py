"""An MCP client as small as tool use allows: `client` is the conversation, `http` and `stdio` are its transports."""

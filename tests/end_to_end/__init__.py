"""Paddock, OpenEnv and the MCP clients talking to each other as real processes."""

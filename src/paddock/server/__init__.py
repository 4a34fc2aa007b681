"""Transports: thin translators between a wire and `paddock.sessions.dispatch`."""

"""OpenEnv's environment classes on our server, unmodified."""

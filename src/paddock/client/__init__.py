"""Acting in environments: one async client, a sync facade, a client for many sessions at once."""

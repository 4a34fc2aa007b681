"""Metrics of a server, and an event bus with sinks. Telemetry observes and decides nothing."""

"""What happened, counted. Telemetry observes: nothing here decides anything."""

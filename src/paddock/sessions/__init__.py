"""Live environments: built, kept, stepped, reaped and closed. Knows no transport."""

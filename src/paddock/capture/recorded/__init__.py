"""Recorded calls as the answers of a new rollout: matching, comparison, and sending the answers again."""

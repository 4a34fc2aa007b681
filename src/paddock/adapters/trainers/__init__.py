"""Doors into trainers while they run: each module is for one trainer, and imports it when it is used.

What was captured already goes out through `paddock.rollouts.export`.
"""

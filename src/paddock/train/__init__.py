"""Integrations with trainers: each module is for one trainer, and imports it when it is used.

What was captured already goes out through `paddock.export`.
"""

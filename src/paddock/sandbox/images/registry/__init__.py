"""Pulls images from registries that speak the OCI distribution protocol."""

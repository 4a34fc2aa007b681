"""Dockerfiles without a container engine. Each step is a layer, stored under a hash of its inputs."""

"""Dockerfiles without a container runtime. Each step is a layer, stored under a hash of its inputs."""

"""Images without a container runtime: pulled, imported or built, unpacked once, shared by sandboxes."""

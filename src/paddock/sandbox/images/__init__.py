"""Images without a container engine: pulled, imported or built, unpacked once, shared by sandboxes."""

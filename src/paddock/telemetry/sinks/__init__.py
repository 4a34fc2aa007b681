"""Where events go. Each sink is a module of its own that is imported only when somebody configures it."""

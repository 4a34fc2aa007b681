"""The process of one hosted instance: an environment on an origin of its own.

`python -m paddock.fleet.instance` imports what it needs, reads one JSON line with its `InstanceSpec`, and writes one
JSON line with its port when it serves. It ends when its standard input is closed.

An environment class need not know that it is hosted. It may define two methods for the host:

- `open_database(path)`: keep the state in the SQLite file at `path`, which is new and empty. Called before every
  reset; `reset` fills it. The host copies the file after the reset: the copy is the database `seed`, the file
  itself is `current`.
- `page()`: the state as HTML, shown at `/` and on the screen of the `computer` tool. Its forms post to `/`: the
  field `tool` names a tool, the others are its arguments.
"""

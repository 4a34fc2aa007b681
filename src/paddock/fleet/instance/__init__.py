"""The process of one hosted instance: an environment on an origin of its own.

`python -m paddock.fleet.instance` imports what it needs, reads one JSON line that says what it is to be, and
answers with one line when it serves. It ends with its standard input.

An environment class need not know that it is hosted. One that wants to be looked into may have these methods:

- `open_database(path)`: keep your state in the SQLite file at `path`, which is new and empty. Called before every
  reset; `reset` fills it. The host copies the file after the reset: the copy is the database `seed`, the file
  itself is `current`.
- `page()`: the state as HTML, shown at `/` and on the screen of the `computer` tool. Its forms post to `/`: the
  field `tool` names a tool, the others are its arguments.
"""

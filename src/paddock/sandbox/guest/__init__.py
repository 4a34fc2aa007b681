"""The guest: the one program of ours that runs inside a sandbox, whatever isolates it.

It starts commands, hands their output on, reads and writes files, forwards ports, watches the limits, and ends
everything when its owner is gone. It needs Python 3.10 or later and its standard library; `paddock.sandbox.bundle`
ships its modules as text. `main` is its entry, `multiplexer` describes the protocol.

Modules that a local sandbox loads import neither `socket`, `signal` nor `json`: those import enum and re, and would
double the start-up time.
"""

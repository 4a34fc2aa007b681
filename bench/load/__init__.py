"""Load generators: programs that press one server and print one JSON line.

Each runs in a process of its own, keeps a closed loop (a new request only after the
answer to the last one) and is lean, so that the server is what gets measured.
"""

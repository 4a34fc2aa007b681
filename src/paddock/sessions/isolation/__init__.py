"""Environments in child processes: what crashes or hangs there ends there.

    host      a program that loads the environment once and forks children for its sessions. Standard library only
    loader    what the host loads for environments of ours
    process   the host, seen from the server: started, given sessions, started again when it died
    link      the connection of one session
    remote    an environment whose methods run at the other end of a link
    isolate   puts all of it behind the methods of a blueprint

Invariant: a session's environment shares no process with the server, nor with more than `sessions_per_process - 1`
others. The host is a fresh interpreter with one thread, so it may fork; the server, which has many, never does.
Sessions get a socket pair each, whose far end is handed over, so there is no address that others could connect to.
"""

"""Environments in child processes: a crash or a hang there does not reach the server.

    host      a program that loads the environment once and forks children for its sessions. Standard library only
    loader    runs in the host and its children: carries out the requests for environments of ours
    process   the server's side of the host: starts it, opens sessions in it, replaces it when it died
    channel   the server's end of one session's socket: requests out, responses in
    remote    an environment whose methods run at the other end of a channel
    isolate   replaces the methods of a spec by requests to a child process

Invariant: a session's environment shares no process with the server, nor with more than `sessions_per_process - 1`
others. The host is a fresh interpreter with one thread, so it may fork; the server, which has many, never does.
Each session gets a socket pair. One end is passed to the child (SCM_RIGHTS), so there is no address to connect to.
"""

"""Environments that live in a process of their own, under another interpreter.

    host      what runs there: a thread for each session. Standard library only
    process   the process, seen from here: started, asked who it is, started again when it died
    link      the connection of one session
    hosted    our environment classes in front of it

Sessions get a socket pair each, whose far end is handed over; so there is no address that others could connect to.
"""

"""The page: what rollouts did, token by token, while they run and afterwards; and a way to play with a server.

`app` has the routes, one small module per concern answers them, and `static/` is all that a browser gets.
Nothing here changes a rollout, except that it may be asked to stop.
"""

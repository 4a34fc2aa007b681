"""The proxy on the host between a coding agent and a model endpoint: it records every call, token by token.

`proxy.Capture` serves one rollout's agent; its module describes the path of a request. `upstream.Upstream` is the
HTTP client of the endpoints, shared by all rollouts. `probe` reports what an endpoint returns.
"""

"""What a sandbox may reach: a policy for each phase, and the proxy through which all traffic leaves."""

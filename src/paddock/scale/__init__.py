"""More than one machine, by Ray: environment hosts behind a gateway, rollouts and instances over all nodes."""

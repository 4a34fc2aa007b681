"""More than one machine, by Ray: environment hosts behind one door, rollouts and instances over all nodes."""

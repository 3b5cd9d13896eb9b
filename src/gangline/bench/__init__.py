"""How fast are the network and the collectives of this cluster? Measured in bounded time, kept for the planner."""

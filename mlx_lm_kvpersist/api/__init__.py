"""HTTP: fields and headers for the cache, the operator's routes, agents, and further APIs."""

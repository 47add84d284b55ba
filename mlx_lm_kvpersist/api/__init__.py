"""HTTP: request headers and fields, the operator's routes, agents, Messages and Responses APIs."""

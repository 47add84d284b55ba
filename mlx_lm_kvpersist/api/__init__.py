"""HTTP: the fields and headers of requests and replies that concern the cache, and other APIs."""

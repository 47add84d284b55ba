"""HTTP: what a request and a reply carry for the cache."""

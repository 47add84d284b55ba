"""Parts of the documentation that are generated from code: `python -m tools.docs` writes them."""

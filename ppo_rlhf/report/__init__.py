"""Look inside a run: page.py makes the page, and derivation.py each number of a token."""

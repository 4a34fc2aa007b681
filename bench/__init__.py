"""Side-by-side benchmarks of Paddock and its peers; run `python -m bench`.

Knows nothing of Paddock's insides: every measure talks to servers over the wire,
except `vector`, which drives each project's own client.
"""

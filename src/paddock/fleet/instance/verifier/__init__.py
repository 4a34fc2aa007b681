"""Running a verifier: a warden process that forks one limited, jailed child for each run.

`paddock.fleet.instance.verifying` is the side of the plane. Nothing in this package runs in the plane's own process.
"""

"""The plane's HTTP surface: each module translates requests onto one part of the plane."""

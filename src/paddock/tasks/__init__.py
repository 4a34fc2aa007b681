"""Tasks: the value, its forms on disk and on the wire, and sets of them. `shipped/` holds those of Paddock."""

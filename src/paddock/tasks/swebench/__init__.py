"""Rows like those of SWE-bench as tasks. `rows` makes the tasks, `scripts` writes what their tests run, `package`
calls the `swebench` package, and `package_program` is the program in which that package is imported.
"""

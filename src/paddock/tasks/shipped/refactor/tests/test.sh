#!/bin/bash
# Nothing of the work folder is on the path of the process that decides.
exec python3 -I -B "$(dirname "$0")/check.py"

#!/bin/bash
set -euo pipefail
cp "$(dirname "$0")/schedule.py" /app/schedule.py

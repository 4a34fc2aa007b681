#!/bin/bash
# The reward is 1 if the database has exactly the expected rows.
mkdir -p /logs/verifier
sqlite3 -readonly /app/totals.db 'SELECT customer, cents FROM totals' | LC_ALL=C sort > /tmp/rows.txt
if diff /tests/expected.txt /tmp/rows.txt; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi

#!/bin/bash
# The reward is the share of the checks that hold.
mkdir -p /logs/verifier
passed=0

check() { # check NAME EXPECTED ACTUAL
  if [ "$2" = "$3" ]; then
    passed=$((passed + 1))
  else
    echo "$1: expected $2, got $3"
  fi
}

ask() { timeout 10 redis-cli -h 127.0.0.1 -p 6380 "$@" 2>&1; }

# Not empty but unset: redis-cli would send an empty password.
unset REDISCLI_AUTH
check "without the password" "NOAUTH Authentication required." "$(ask GET river)"
export REDISCLI_AUTH=correct-horse-7
check "the server answers" PONG "$(ask PING)"
check "number of keys" 3 "$(ask DBSIZE)"
check "a value with spaces" "Paris and London" "$(ask GET city)"
ttl=$(ask TTL mountain)
[[ "$ttl" =~ ^[0-9]+$ ]] && [ "$ttl" -gt 0 ] && [ "$ttl" -le 3600 ] && limited=yes
check "the keys expire" yes "${limited:-no: $ttl}"

if [ "$passed" = 5 ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo "0.$((passed * 2))" > /logs/verifier/reward.txt
fi

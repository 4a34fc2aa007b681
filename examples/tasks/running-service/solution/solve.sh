#!/bin/bash
set -euo pipefail
cd /app
REDISCLI_AUTH=$(cat password.txt)
export REDISCLI_AUTH
redis-server --bind 127.0.0.1 --port 6380 --requirepass "$REDISCLI_AUTH" --daemonize yes --dir /tmp
until redis-cli -p 6380 PING | grep -q PONG; do sleep 0.1; done
while read -r key value; do
  redis-cli -p 6380 SET "$key" "$value" EX 3600
done < pairs.txt

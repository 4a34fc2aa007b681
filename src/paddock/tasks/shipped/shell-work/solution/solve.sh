#!/bin/bash
set -e
export LC_ALL=C
declare -A errors
for path in inbox/*-[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9].log; do
    name=${path#inbox/}
    if [ ! -s "$path" ]; then
        echo "$name"
        rm "$path"
        continue
    fi
    stem=${name%.log}
    service=${stem%-????-??-??}
    day=${stem#"$service"-}
    folder=sorted/${day%-??}
    mkdir -p "$folder"
    mv "$path" "$folder/${service}_${day//-/}.log"
done | sort > removed.txt
for path in sorted/*/*.log; do
    name=${path##*/}
    service=${name%_*}
    count=$(cut -d' ' -f2 "$path" | grep -cx ERROR || true)
    errors[$service]=$((${errors[$service]:-0} + count))
done
for service in "${!errors[@]}"; do
    echo "${errors[$service]} $service"
done | sort -k1,1nr -k2 > report.txt
cat report.txt

#!/bin/bash
set -e
cat > timesheet.py <<'PYTHON'
import json
import re
import sys

LINE = re.compile(r"(\S+)\s+(?:(\d+)h(?:(\d+)m)?|(\d+)m)", re.ASCII)


def main():
    arguments = sys.argv[1:]
    if arguments not in ([], ["--json"]):
        return 2
    people = {}
    for number, line in enumerate(sys.stdin, start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        found = LINE.fullmatch(line)
        if found is None:
            print(f"line {number}: invalid", file=sys.stderr)
            return 2
        name, hours, rest, minutes = found.groups()
        people[name] = people.get(name, 0) + int(hours or 0) * 60 + int(rest or 0) + int(minutes or 0)
    total = sum(people.values())
    if arguments:
        print(json.dumps({"people": people, "total": total}))
        return 0
    for name, spent in sorted(people.items(), key=lambda item: (-item[1], item[0])):
        print(f"{name} {spent // 60}:{spent % 60:02d}")
    print(f"total {total // 60}:{total % 60:02d}")
    return 0


sys.exit(main())
PYTHON
python3 timesheet.py < example.txt

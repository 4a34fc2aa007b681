import sys
from itertools import islice

from dateutil.parser import parse
from dateutil.rrule import rrulestr

rule, start, count = sys.argv[1:]
try:
    times = rrulestr(rule, dtstart=parse(start))
except ValueError as error:
    print(f"cannot be read: {error}", file=sys.stderr)
    sys.exit(2)
for time in islice(times, int(count)):
    print(f"{time:%Y-%m-%d %H:%M}")

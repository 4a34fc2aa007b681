"""Half-open intervals of whole numbers, written as pairs: (2, 5) holds 2, 3 and 4."""


def merge(intervals):
    """The same numbers in as few intervals as possible, in ascending order.

    Intervals that overlap or touch become one. Empty intervals, whose end is not above their start, are
    dropped. The result is a list of tuples; the argument is not changed.
    """
    merged = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def gaps(intervals, start, end):
    """The parts of (start, end) that no interval holds, as a list of tuples in ascending order.

    Intervals may reach over the start or the end, or lie outside altogether.
    """
    found = []
    position = start
    for left, right in merge(intervals):
        if left > position:
            found.append((position, left))
        position = right
    if position < end:
        found.append((position, end))
    return found

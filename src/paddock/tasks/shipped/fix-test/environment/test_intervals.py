import unittest

from intervals import gaps, merge


class MergeTest(unittest.TestCase):
    def test_overlapping_intervals_become_one(self):
        self.assertEqual(merge([(3, 6), (1, 4)]), [(1, 6)])

    def test_touching_intervals_become_one(self):
        self.assertEqual(merge([(1, 2), (2, 3)]), [(1, 3)])

    def test_empty_intervals_are_dropped(self):
        self.assertEqual(merge([(5, 5), (7, 6), (1, 2)]), [(1, 2)])

    def test_an_interval_inside_another_changes_nothing(self):
        self.assertEqual(merge([(0, 10), (2, 3), (12, 13)]), [(0, 10), (12, 13)])


class GapsTest(unittest.TestCase):
    def test_what_lies_between_is_a_gap(self):
        self.assertEqual(gaps([(2, 3), (5, 6)], 0, 8), [(0, 2), (3, 5), (6, 8)])

    def test_without_intervals_everything_is_a_gap(self):
        self.assertEqual(gaps([], 1, 4), [(1, 4)])

    def test_intervals_outside_make_no_gap(self):
        self.assertEqual(gaps([(-5, -2), (8, 9)], 0, 4), [(0, 4)])


if __name__ == "__main__":
    unittest.main()

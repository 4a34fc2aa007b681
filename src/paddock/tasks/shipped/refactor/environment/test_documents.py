import unittest

import invoice
import quote
import receipt

LINES = [("pen", 3, 199), ("desk", 1, 12950)]


class DocumentsTest(unittest.TestCase):
    def test_an_invoice(self):
        expected = (
            "INVOICE for Ada\n3 x pen: 5.97\n1 x desk: 129.50\n"
            "subtotal 135.47\ndiscount 13.55\ntax 23.16\nto pay 145.08"
        )
        self.assertEqual(invoice.render("Ada", LINES, 10, 19), expected)

    def test_a_receipt(self):
        self.assertEqual(
            receipt.render(LINES, 19, 10000),
            "RECEIPT\npen 5.97\ndesk 129.50\nof which tax 25.74\ntotal 161.21\npaid 100.00",
        )

    def test_a_quote(self):
        self.assertEqual(
            quote.render("Bob", LINES, 5),
            "QUOTE for Bob: 128.70 before tax\n- pen (3): 5.97\n- desk (1): 129.50\nyou save 6.77",
        )


if __name__ == "__main__":
    unittest.main()

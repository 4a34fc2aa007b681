#!/bin/bash
set -e
cat > totals.py <<'PYTHON'
"""The arithmetic of all documents, in whole cents."""


def compute_totals(lines, discount_percent=0, tax_percent=0):
    amounts = [quantity * price for _, quantity, price in lines]
    subtotal = sum(amounts)
    discount = _percent(subtotal, discount_percent)
    tax = _percent(subtotal - discount, tax_percent)
    total = subtotal - discount + tax
    return {"amounts": amounts, "subtotal": subtotal, "discount": discount, "tax": tax, "total": total}


def format_money(cents):
    return f"{cents // 100}.{cents % 100:02d}"


def _percent(cents, percent):
    return (cents * percent + 50) // 100
PYTHON
cat > invoice.py <<'PYTHON'
"""Invoices: with a discount and with tax."""

from totals import compute_totals, format_money


def render(customer, lines, discount_percent, tax_percent):
    """The text of an invoice. Prices are in cents, and each line is a (name, quantity, price)."""
    totals = compute_totals(lines, discount_percent, tax_percent)
    rows = [f"INVOICE for {customer}"]
    for (name, quantity, _), amount in zip(lines, totals["amounts"]):
        rows.append(f"{quantity} x {name}: {format_money(amount)}")
    for word, key in (("subtotal", "subtotal"), ("discount", "discount"), ("tax", "tax"), ("to pay", "total")):
        rows.append(f"{word} {format_money(totals[key])}")
    return "\n".join(rows)
PYTHON
cat > receipt.py <<'PYTHON'
"""Receipts: no discount, the tax is shown."""

from totals import compute_totals, format_money


def render(lines, tax_percent, paid):
    """The text of a receipt. Prices and `paid` are in cents, and each line is a (name, quantity, price)."""
    totals = compute_totals(lines, tax_percent=tax_percent)
    rows = ["RECEIPT"]
    for (name, _, _), amount in zip(lines, totals["amounts"]):
        rows.append(f"{name} {format_money(amount)}")
    rows.append(f"of which tax {format_money(totals['tax'])}")
    rows.append(f"total {format_money(totals['total'])}")
    rows.append("paid in full" if paid >= totals["total"] else f"paid {format_money(paid)}")
    return "\n".join(rows)
PYTHON
cat > quote.py <<'PYTHON'
"""Quotes: a discount, and no tax yet."""

from totals import compute_totals, format_money


def render(customer, lines, discount_percent):
    """The text of a quote. Prices are in cents, and each line is a (name, quantity, price)."""
    totals = compute_totals(lines, discount_percent)
    rows = [f"QUOTE for {customer}: {format_money(totals['total'])} before tax"]
    for (name, quantity, _), amount in zip(lines, totals["amounts"]):
        rows.append(f"- {name} ({quantity}): {format_money(amount)}")
    if totals["discount"]:
        rows.append(f"you save {format_money(totals['discount'])}")
    return "\n".join(rows)
PYTHON
python3 -m unittest test_documents

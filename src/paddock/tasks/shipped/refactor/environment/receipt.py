"""Receipts: no discount, the tax is shown."""


def render(lines, tax_percent, paid):
    """The text of a receipt. Prices and `paid` are in cents, and each line is a (name, quantity, price)."""
    rows = ["RECEIPT"]
    subtotal = 0
    for name, quantity, price in lines:
        amount = quantity * price
        subtotal += amount
        rows.append(f"{name} {amount // 100}.{amount % 100:02d}")
    tax = (subtotal * tax_percent + 50) // 100
    total = subtotal + tax
    rows.append(f"of which tax {tax // 100}.{tax % 100:02d}")
    rows.append(f"total {total // 100}.{total % 100:02d}")
    rows.append("paid in full" if paid >= total else f"paid {paid // 100}.{paid % 100:02d}")
    return "\n".join(rows)

"""Invoices: with a discount and with tax."""


def render(customer, lines, discount_percent, tax_percent):
    """The text of an invoice. Prices are in cents, and each line is a (name, quantity, price)."""
    rows = [f"INVOICE for {customer}"]
    subtotal = 0
    for name, quantity, price in lines:
        amount = quantity * price
        subtotal += amount
        rows.append(f"{quantity} x {name}: {amount // 100}.{amount % 100:02d}")
    discount = (subtotal * discount_percent + 50) // 100
    tax = ((subtotal - discount) * tax_percent + 50) // 100
    total = subtotal - discount + tax
    rows.append(f"subtotal {subtotal // 100}.{subtotal % 100:02d}")
    rows.append(f"discount {discount // 100}.{discount % 100:02d}")
    rows.append(f"tax {tax // 100}.{tax % 100:02d}")
    rows.append(f"to pay {total // 100}.{total % 100:02d}")
    return "\n".join(rows)

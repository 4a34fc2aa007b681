"""Quotes: a discount, and no tax yet."""


def render(customer, lines, discount_percent):
    """The text of a quote. Prices are in cents, and each line is a (name, quantity, price)."""
    subtotal = 0
    rows = []
    for name, quantity, price in lines:
        amount = quantity * price
        subtotal += amount
        rows.append(f"- {name} ({quantity}): {amount // 100}.{amount % 100:02d}")
    discount = (subtotal * discount_percent + 50) // 100
    total = subtotal - discount
    header = f"QUOTE for {customer}: {total // 100}.{total % 100:02d} before tax"
    if discount:
        rows.append(f"you save {discount // 100}.{discount % 100:02d}")
    return "\n".join([header, *rows])

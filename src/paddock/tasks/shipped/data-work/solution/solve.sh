#!/bin/bash
set -e
python3 - <<'PYTHON'
import csv
import json
from collections import Counter
from fractions import Fraction
from math import floor

rates = json.load(open("data/rates.json"))
countries = {customer["id"]: customer["country"] for customer in json.load(open("data/customers.json"))}
orders = {}
for row in csv.DictReader(open("data/orders.csv", newline="")):
    orders[row["order_id"]] = row
counted = {key: row for key, row in orders.items() if row["status"] != "cancelled"}
refunds = Counter()
for line in open("data/refunds.jsonl"):
    refund = json.loads(line)
    refunds[refund["order_id"]] += refund["cents"]

total = 0
by_country, by_month, by_customer = Counter(), Counter(), Counter()
for key, row in counted.items():
    exact = Fraction(row["amount"].replace(",", "")) * Fraction(rates[row["currency"]]) * 100
    cents = floor(exact + Fraction(1, 2)) - refunds[key]
    total += cents
    by_country[countries.get(row["customer_id"], "unknown")] += cents
    by_month[row["date"][:7]] += cents
    by_customer[row["customer_id"]] += cents
ranked = sorted(by_customer, key=lambda customer: (-by_customer[customer], customer))
summary = {
    "orders": len(counted),
    "revenue_cents": total,
    "by_country": by_country,
    "by_month": by_month,
    "top_customers": ranked[:3],
}
json.dump(summary, open("summary.json", "w"), indent=2)
PYTHON
cat summary.json

# prices.py
from decimal import Decimal

VAT = Decimal("0.19")


class Prices:
    """Net prices by article, in euros."""

    def __init__(self, net: dict[str, Decimal]) -> None:
        self._net = net

    def gross(self, article: str) -> Decimal:
        return (self._net[article] * (1 + VAT)).quantize(Decimal("0.01"))

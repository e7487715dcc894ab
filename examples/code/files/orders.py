# orders.py
from dataclasses import dataclass
from decimal import Decimal

from prices import Prices
from stock import Stock


@dataclass(frozen=True)
class Line:
    article: str
    count: int


@dataclass(frozen=True)
class Order:
    customer: str
    lines: tuple[Line, ...]

    def total(self, prices: Prices) -> Decimal:
        return sum((prices.gross(line.article) * line.count for line in self.lines), Decimal(0))

    def pick(self, stock: Stock) -> None:
        for line in self.lines:
            stock.take(line.article, line.count)

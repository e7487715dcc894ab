# stock.py
from dataclasses import dataclass, field


@dataclass
class Stock:
    """How many of each article lie on the shelves."""

    counts: dict[str, int] = field(default_factory=dict)

    def receive(self, article: str, count: int) -> None:
        self.counts[article] = self.counts.get(article, 0) + count

    def take(self, article: str, count: int) -> None:
        if self.counts.get(article, 0) < count:
            raise LookupError(f"only {self.counts.get(article, 0)} of {article} are left")
        self.counts[article] -= count

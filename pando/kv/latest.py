"""A dictionary that remembers so many things and no more."""

from collections import OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Latest(OrderedDict[K, V]):
    """The latest `most` that were put in. What is put again keeps its place, unless it is moved to the end. Not a plain dict: there the
    oldest is looked for behind all that are gone."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        if len(self) > self._most:
            self.popitem(last=False)

"""Kernels that are found once."""

import pytest
import torch

from pando.kernels.launch import Launches, kind_of, power_of_two


class Compiled:
    def __init__(self, kernel: "Kernel") -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> "Launched":
        return Launched(self.kernel.launched, grid)


class Launched:
    def __init__(self, told: list[tuple[object, ...]], grid: tuple[int, ...]) -> None:
        self.told, self.grid = told, grid

    def __call__(self, *arguments: object) -> None:
        self.told.append((self.grid, *arguments))


class Kernel:
    """As Triton's: looking for what was compiled is what takes long."""

    def __init__(self) -> None:
        self.found, self.launched = list[tuple[object, ...]](), list[tuple[object, ...]]()

    def __getitem__(self, grid: tuple[int, ...]) -> object:
        def find(*arguments: object, **options: object) -> Compiled:
            self.found.append((grid, *arguments, options))
            return Compiled(self)

        return find


def test_a_kernel_is_found_once_for_each_kind_and_launched_with_what_it_is_given() -> None:
    kernel, other, launch = Kernel(), Kernel(), Launches()
    launch(kernel, "a", (3,), 1, warps=4)
    launch(kernel, "a", (5,), 2, warps=4)
    launch(kernel, "b", (7, 2), 3, warps=8)
    launch(kernel, "b", (7, 2), 4, warps=8)
    launch(other, "a", (1,), 5)
    assert kernel.found == [((3,), 1, {"warps": 4}), ((7, 2), 3, {"warps": 8})]
    assert kernel.launched == [((5, 1, 1), 2), ((7, 2, 1), 4)]
    assert (len(other.found), other.launched) == (1, [])


def test_tensors_of_another_type_or_place_are_of_another_kind() -> None:
    room = torch.zeros(64, dtype=torch.bfloat16)
    assert room.data_ptr() % 16 == 0
    assert kind_of(room) == kind_of(room[8:]) != kind_of(room[1:])
    assert kind_of(room) != kind_of(room.float())


@pytest.mark.parametrize(("least", "found"), [(0, 1), (1, 1), (2, 2), (3, 4), (64, 64), (65, 128)])
def test_a_power_of_two_is_the_least_that_is_enough(least: int, found: int) -> None:
    assert power_of_two(least) == found

"""Which model a benchmark measures: one by name, or one of a known shape with random weights."""

import argparse
from typing import get_args

from ..config import Device, DType, EngineConfig
from ..errors import InvalidOption
from ..model.load import Model, choose_device, choose_dtype, load
from .measure import machine
from .random_model import SHAPES, random_model

NAME = EngineConfig.model  # which is also the shape of random weights, if no other is wanted


def add_model(parser: argparse.ArgumentParser) -> None:
    add_name(parser, shape="")
    parser.add_argument("--shape", choices=SHAPES, help=f"of the random weights ({NAME})")
    add_device(parser)


def add_name(parser: argparse.ArgumentParser, what: str = "a model", shape: str = f"in the shape of {NAME} ") -> None:
    parser.add_argument("--model", default=NAME, help=f"{what} by name, directory or file ({NAME})")
    parser.add_argument("--random-weights", action="store_true", help=f"one {shape}with random weights; needs no file or network")


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default=EngineConfig.device, choices=get_args(Device), help="where the model runs (auto)")
    parser.add_argument("--dtype", default=EngineConfig.dtype, choices=get_args(DType), help="of weights and states (auto)")


def model_of(arguments: argparse.Namespace, quantization: str = "none") -> Model:
    if arguments.random_weights:
        place = choose_device(arguments.device)
        return random_model(arguments.shape or NAME, place, choose_dtype(arguments.dtype, place), quantization=quantization)
    if arguments.shape:
        raise InvalidOption(f"--shape {arguments.shape} is of random weights; give --random-weights, too")
    return load(arguments.model, device=arguments.device, dtype=arguments.dtype, quantization=quantization)


def named(arguments: argparse.Namespace) -> str:
    return f"random weights in the shape of {arguments.shape or NAME}" if arguments.random_weights else str(arguments.model)


def facts_of(name: str, model: Model, command: str) -> dict[str, str | int]:
    return machine(command) | {"model": name, "device": str(model.device), "dtype": str(model.dtype)}

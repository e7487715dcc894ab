"""Which model a benchmark measures: one by name, or one of a known shape with random weights."""

import argparse
from typing import get_args

from ..config import Device, DType, EngineConfig
from ..model.load import Model, choose_device, choose_dtype, load
from .random_model import SHAPES, random_model


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=EngineConfig.model, help=f"a model by name, directory or file ({EngineConfig.model})")
    parser.add_argument("--random-weights", action="store_true", help="a model with random weights; needs no file or network")
    parser.add_argument("--shape", default="smollm2-135m", choices=SHAPES, help="of the random weights (smollm2-135m)")
    parser.add_argument("--device", default=EngineConfig.device, choices=get_args(Device), help="where the model runs (auto)")
    parser.add_argument("--dtype", default=EngineConfig.dtype, choices=get_args(DType), help="of weights and states (auto)")


def model_of(arguments: argparse.Namespace, quantization: str = "none") -> Model:
    if arguments.random_weights:
        place = choose_device(arguments.device)
        return random_model(arguments.shape, place, choose_dtype(arguments.dtype, place), quantization=quantization)
    return load(arguments.model, device=arguments.device, dtype=arguments.dtype, quantization=quantization)

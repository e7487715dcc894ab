"""Flags of a command line, and options in Python: how they are read, what was meant by a wrong one, what other engines call them."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from .errors import InvalidOption, nearest

RENAMED = {  # options as other engines call them, and as Pando does
    **dict.fromkeys(("kv_cache_dtype", "cache_type_k", "cache_type_v"), "kv_dtype"),
    "block_size": "page_size",
    **dict.fromkeys(("model_path", "hf_repo"), "model"),
    **dict.fromkeys(("ctx_size", "n_ctx", "context_length"), "max_model_len"),
    **dict.fromkeys(("max_running_requests", "parallel"), "max_num_seqs"),
    **dict.fromkeys(("chunked_prefill_size", "ubatch_size"), "max_num_batched_tokens"),
    **dict.fromkeys(("swap_space", "kv_offloading_size", "hicache_size", "cache_ram"), "host_gib"),
}


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


ELSEWHERE = {  # flags of other engines, and what to do here
    **{flag_of(theirs): f"it is {flag_of(ours)} here" for theirs, ours in RENAMED.items()},
    **dict.fromkeys(("--model", "-m", "--model-path", "-hf", "--hf-repo"), "give the model without a flag, as in `pando serve MODEL`"),
    **{"-c": "it is --max-model-len here", "-np": "it is --max-num-seqs here", "-t": "it is --threads here"},
    **{"-ub": "it is --max-num-batched-tokens here", **dict.fromkeys(("--alias", "-a"), "it is --served-model-name here")},
    **dict.fromkeys(("--enforce-eager", "--disable-cuda-graph"), "it is --no-cuda-graphs here"),
    **dict.fromkeys(("--disable-radix-cache", "--no-enable-prefix-caching"), "it is --no-prefix-caching here"),
    "--context-shift": "it is --truncation auto here, and `pando chat` does it anyway",
    **dict.fromkeys(("--slot-save-path", "--prompt-cache"), "--disk-gib says how much of the cache is kept on disk, and --disk-dir where"),
    **dict.fromkeys(("-ngl", "--n-gpu-layers", "--gpu-layers"), "a model is on one device as a whole; --device says on which"),
    "--mem-fraction-static": "--gpu-memory-utilization is the share of what is free after the weights",
    **dict.fromkeys(("--enable-chunked-prefill", "--cache-prompt", "--flash-attn", "-fa"), "this is on by default: leave it out"),
    "--trust-remote-code": "Pando runs no code from a model: leave it out",
    **dict.fromkeys(("--enable-auto-tool-choice", "--tool-call-parser", "--jinja"), "calls are recognised without it: leave it out"),
    **dict.fromkeys(
        ("--tensor-parallel-size", "-tp", "--tp-size", "--tp", "--pipeline-parallel-size"), "Pando runs on one GPU: leave it out"
    ),
}


def hint(name: str, known: Sequence[str]) -> str:
    """What is told of an option that Python code gave, or a file, and that Pando does not have."""
    if name in RENAMED:
        return f"it is {RENAMED[name]} here"
    if (plain := name.removeprefix("no_")) != name and plain in known:
        return f"it is {plain}=False here"
    told, flag = ELSEWHERE.get(flag_of(name), ""), re.compile("--(no-)?([a-z-]+)( auto)?")
    if told and {ours.replace("-", "_") for _, ours, _ in flag.findall(told)} <= set(known):  # others only a command has
        return flag.sub(lambda found: found[2].replace("-", "_") + "=False" * bool(found[1]) + '="auto"' * bool(found[3]), told)
    close = nearest(name, known)
    return f"did you mean {close}?" if close else f"known are {', '.join(known)}"


class Parser(argparse.ArgumentParser):
    """Errors look like every other error of Pando. What was parsed has as its `parser` that of the command, whose flags these are."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        found, unknown = super().parse_known_args(args, namespace)
        found.parser = getattr(found, "parser", self)
        return found, unknown

    def error(self, message: str) -> NoReturn:
        flags = self._option_string_actions
        wrong = next((word for word in re.findall(r"--[\w-]+", message) if word not in flags), "")
        wrong = re.sub("^--no(?!-)", "--no-", wrong.replace("_", "-"))
        known = [flag for flag in flags if flag.startswith("--no-") == wrong.startswith("--no-")]  # never the contrary
        if choice := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)$", message):
            wrong, known = choice[1], re.findall(r"[\w.-]+", choice[2])
        close = nearest(wrong, known)
        raise InvalidOption(f"{message}; {f'did you mean {close}? See' if close else 'see'} `{self.prog} --help`")


def written_file(text: str) -> Path:
    """A file that is written at the end: what would fail then is refused before anything is measured."""
    file = Path(text)
    if file.is_dir():
        raise argparse.ArgumentTypeError(f"{file} is a folder; name a file in it")
    if not file.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{file}: there is no folder {file.parent}; make it, or write elsewhere")
    return file

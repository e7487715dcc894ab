"""How long a context may be, how large the pool, and whether a step fits beside it."""

import logging
from dataclasses import replace

import torch

from ..config import ROWS, EngineConfig
from ..errors import InvalidOption
from ..kv.pages import Pages
from ..kv.pool import PagePool
from ..kv.segment import Lineage
from ..model.config import ModelConfig
from ..model.decoder import Step
from ..model.load import Model
from ..model.memory import free_memory
from .request import SamplingParams
from .row import Row
from .sampler import Sampler

log = logging.getLogger(__name__)

POOL_CONTEXTS = 8  # full contexts that the pool holds by default on a CPU, memory permitting
MAX_SLOTS = 2**31 - 1  # kernels count them in 32 bits
CPU_SHARE = 0.25  # of the free memory, at most
GIB = 2**30


def context_of(facts: ModelConfig, config: EngineConfig) -> int:
    native = facts.max_positions
    if config.max_model_len is None:
        return native
    if config.max_model_len > native:
        raise InvalidOption(f"max_model_len is {config.max_model_len} and the model was made for {native}; use at most {native}")
    return config.max_model_len


def page_count(model: Model, config: EngineConfig, context: int) -> int:
    facts, free = model.config, free_memory(model.device)
    size = PagePool.page_bytes(config.page_size, facts.layers, facts.kv_heads, facts.head_dim, model.states)
    if config.kv_cache_tokens is not None:
        count, needed = min(config.kv_cache_tokens, MAX_SLOTS) // config.page_size, config.kv_cache_tokens // config.page_size * size
        if count * size > free:
            raise InvalidOption(
                f"a KV cache of {config.kv_cache_tokens} tokens needs {needed / GIB:.1f} GiB and {free / GIB:.1f} GiB are free; "
                f"lower kv_cache_tokens to at most {free // size * config.page_size}"
            )
        return count
    on_gpu = model.device.type == "cuda"
    share = config.gpu_memory_utilization if on_gpu else CPU_SHARE
    affordable = min(int(free * share) // size, MAX_SLOTS // config.page_size)
    wanted = -(-POOL_CONTEXTS * context // config.page_size)
    count = affordable if on_gpu else min(affordable, wanted)
    if count < 1:
        raise InvalidOption(
            f"there is no memory for a KV cache: {share:g} of the {free / GIB:.2f} GiB that are free hold no page; "
            f"free some, {'raise gpu_memory_utilization, ' if on_gpu else ''}or choose a smaller model or dtype"
        )
    if on_gpu and count * config.page_size < context:
        log.warning(
            "the KV cache holds %d tokens and a request may have %d: longer ones are refused; raise gpu_memory_utilization, or lower "
            "max_model_len to say so",
            count * config.page_size,
            context,
        )
    return count


def pool_of(model: Model, config: EngineConfig, pages: Pages) -> PagePool:
    """The memory of the KV cache."""
    facts = model.config
    try:
        return PagePool(
            pages, layers=facts.layers, kv_heads=facts.kv_heads, head_dim=facts.head_dim, dtype=model.states, device=model.device
        )
    except torch.OutOfMemoryError:  # others took it meanwhile, or it is free in pieces only
        size = pages.count * PagePool.page_bytes(pages.page_size, facts.layers, facts.kv_heads, facts.head_dim, model.states)
        raise InvalidOption(
            f"a KV cache of {size / GIB:.1f} GiB does not fit into the memory that is free; lower gpu_memory_utilization (it is "
            f"{config.gpu_memory_utilization:g}) or kv_cache_tokens"
        ) from None


def rows_of(model: Model, config: EngineConfig, pool: PagePool) -> int:
    """How many run at the same time. On a GPU it is seen that the largest step fits beside the KV cache; where nobody said how many rows it
    has, there are as many as do, but no fewer than on a CPU."""
    rows = config.rows_on(model.device.type)
    if model.device.type != "cuda":
        return rows
    while True:
        try:
            check_step(model, replace(config, max_num_seqs=rows), pool)
            return rows
        except InvalidOption:
            if config.max_num_seqs is not None or rows <= ROWS:
                raise
        rows //= 2  # out here: the error holds what was allocated
        log.warning("rows that run at the same time: %d, since steps of more do not fit beside the KV cache", rows)


@torch.inference_mode()
def check_step(model: Model, config: EngineConfig, pool: PagePool) -> None:
    """Computes the largest step, for nobody: what does not fit beside the cache is said now, and not to the first request. Twice, since the
    tokens of a step are read when the next one has been asked for; and with what sampling takes at most, where all tokens are as likely,
    so that a short list does not settle top_p, and everything is sorted."""
    tokens, rows = config.max_num_batched_tokens, min(config.rows_on(model.device.type), config.max_num_batched_tokens)
    numbers = torch.zeros(tokens, dtype=torch.int64, device=model.device)
    step = Step(numbers, numbers, numbers + pool.scratch, numbers[:rows], lambda q, turned, k, v: turned.clone())
    sampler = Sampler(model.config.vocab_size, model.device)
    asked = [Row("", index, [0], SamplingParams(top_p=0.9), index, Lineage.of(b""), 2) for index in range(rows)]
    try:
        first, _ = (sampler.choose(model.decoder.forward(step, pool).zero_(), asked) for _ in range(2))
        first.read()
    except torch.OutOfMemoryError:
        raise InvalidOption(
            f"a step of {tokens} tokens and {rows} rows does not fit beside a KV cache of {pool.nbytes / GIB:.1f} GiB; lower "
            f"gpu_memory_utilization (it is {config.gpu_memory_utilization:g}) or kv_cache_tokens, max_num_batched_tokens or max_num_seqs"
        ) from None

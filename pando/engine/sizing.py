"""How long a context may be, and how large the pool."""

from ..config import EngineConfig
from ..errors import InvalidOption
from ..kv.pool import PagePool
from ..model.load import Model, free_memory

POOL_CONTEXTS = 8  # full contexts that the pool holds by default, memory permitting
MAX_SLOTS = 2**31 - 1  # kernels count them in 32 bits
POOL_SHARE = {"cpu": 0.25, "cuda": 0.85}  # of the free memory, at most


def context_of(model: Model, config: EngineConfig) -> int:
    native = model.config.max_positions
    if config.max_model_len is None:
        return native
    if config.max_model_len > native:
        raise InvalidOption(f"max_model_len is {config.max_model_len} and the model was made for {native}; use at most {native}")
    return config.max_model_len


def page_count(model: Model, config: EngineConfig, context: int) -> int:
    facts, free = model.config, free_memory(model.device)
    size = PagePool.page_bytes(config.page_size, facts.layers, facts.kv_heads, facts.head_dim, model.dtype)
    if config.kv_cache_tokens is not None:
        count = min(config.kv_cache_tokens, MAX_SLOTS) // config.page_size
        if count * size > free:
            raise InvalidOption(
                f"a KV cache of {config.kv_cache_tokens} tokens needs {count * size / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are free; "
                f"lower kv_cache_tokens to at most {free // size * config.page_size}"
            )
        return count
    affordable = min(int(free * POOL_SHARE[model.device.type]) // size, MAX_SLOTS // config.page_size)
    wanted = -(-POOL_CONTEXTS * context // config.page_size)
    count = affordable if model.device.type == "cuda" else min(affordable, wanted)
    if count < 1:
        raise InvalidOption("there is no memory for a KV cache; free some, or choose a smaller model or dtype")
    return count

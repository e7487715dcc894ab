"""How fast prompts are computed, before any request has shown it: an engine that only loads would never know whether that is worth it."""

import logging
import time
import weakref

import numpy as np
import torch

from ..kv.segment import Lineage
from .engine import Engine
from .request import SamplingParams
from .row import Row, Schedule

log = logging.getLogger(__name__)

FEW = 32  # tokens: on a CPU they tell as much as hundreds, and take a moment
TIMES = 2  # the first of its size may have something to prepare


def measure_before_choosing(engine: Engine) -> None:
    """When something is found below the pool for the first time: whoever has nothing there does not wait for it."""
    seen = weakref.ref(engine)  # the engine has the store, and not the other way round

    def first() -> None:
        here = seen()
        if here is not None:
            measure(here)

    if engine.store is not None:
        engine.store.speeds.measure = first


@torch.inference_mode()
def measure(engine: Engine) -> None:
    """Computes some tokens in pages that nobody uses, and leaves nothing of them."""
    if engine.store is None or not engine.pages.free:
        return
    pages, is_cpu = engine.pages, engine.model.device.type == "cpu"
    most = min(engine.scheduler.budget, engine.max_len, pages.free * pages.page_size)
    count = min(FEW, most) if is_cpu else most
    row = Row("", 0, [0] * count, SamplingParams(), 0, Lineage.of(b""), count)
    row.pages = pages.take(pages.needed(count))
    engine.pool.arrivals, engine.pool.departure = (), None  # those of the step before; what comes in it is nothing to these tokens
    seconds = []
    try:
        for _ in range(TIMES):
            began = time.perf_counter()
            batch = engine.batcher.prepare(Schedule([row], np.zeros(1, dtype=np.int64), [count], [row]))
            engine.model.decoder.forward(engine.batcher.step(batch), engine.pool)
            if not is_cpu:
                torch.cuda.synchronize(engine.model.device)
            seconds.append(time.perf_counter() - began)
        engine.store.speeds.computed(count, min(seconds))
    except torch.OutOfMemoryError:  # then the first requests tell, in smaller steps
        log.warning("how fast prompts are computed is not known yet: a step of %d tokens did not fit into the memory", count)
    except RuntimeError as error:  # whoever is to be answered by such a step will hear of it
        log.warning("how fast prompts are computed is not known yet: %s", error)
    finally:
        pages.give(row.pages)
        engine.scheduler.turns.change()  # what was computed last is not the last step that was made

"""The logprobs of prompts, where they are wanted."""

import torch
from torch import Tensor

from .row import Row, Schedule


def take_scores(schedule: Schedule, logits: Tensor) -> Tensor:
    """Scores prompts; answers the logits of the rows that have caught up."""
    ready, places, place = set(schedule.ready), list[int](), 0
    for row, start, count in zip(schedule.rows, schedule.starts.tolist(), schedule.counts, strict=True):
        if row.is_scored_from(start):
            _score(row, start, logits[place : place + count])
            place += count
        elif row in ready:
            place += 1
        if row in ready:
            places.append(place - 1)
    return logits[torch.tensor(places, dtype=torch.int64, device=logits.device)]


def _score(row: Row, start: int, logits: Tensor) -> None:
    """The logprob of the token that follows each of the computed ones in the prompt. A row that was preempted begins again."""
    assert row.scored is not None
    following = row.prompt[start + 1 : start + len(logits) + 1]
    if following:
        scores = logits[: len(following)].log_softmax(-1, dtype=torch.float32)
        row.scored[start:] = scores.gather(1, torch.tensor(following, device=logits.device)[:, None])[:, 0].tolist()

"""The logprobs of prompts, where they are wanted."""

import torch
from torch import Tensor

from .draw import scores
from .row import Row, Schedule

TOGETHER = 128  # tokens of a prompt that are looked at together: each has a number for every token of the vocabulary


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
    """The logprob of the token that follows each of the computed ones in the prompt, and of others in its place where they are wanted. A
    row that was preempted begins again."""
    assert row.scored is not None
    if len(row.scored) > start:  # they were told already, and who heard of them keeps them as they were
        row.scored, row.others = row.scored[:start], row.others[:start]
    following, wanted = row.prompt[start + 1 : start + len(logits) + 1], row.params.logprobs
    for place in range(0, len(following), TOGETHER):
        tokens = torch.tensor(following[place : place + TOGETHER], device=logits.device)
        raw = logits[place : place + len(tokens)].log_softmax(-1, dtype=torch.float32)
        if wanted is None:
            row.scored[start + place :] = raw.gather(1, tokens[:, None])[:, 0].tolist()
        else:
            found = scores(raw, tokens, [wanted] * len(tokens))
            row.scored[start + place :] = [logprob for logprob, _ in found]
            row.others[start + place :] = [top for _, top in found]

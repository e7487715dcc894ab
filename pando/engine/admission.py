"""From a request to rows, or to what is wrong with it; and whose their context is."""

import random
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from ..config import EngineConfig
from ..errors import InvalidOption, InvalidPrompt, PoolTooSmall, PromptTooLong, counted
from ..kv.pages import Pages
from ..kv.run import Origin, Run, are_tokens
from ..kv.segment import Key, Lineage, compact, extend_keys, page_key, root_key
from ..model.load import Model
from .imports import Want, pages_of, wants
from .repair import check_gaps, check_share
from .repair import key as repair_key
from .request import RecomputeReason, Request, Tenant
from .row import Row
from .sampler import check
from .truncation import Cut

MANY_OWNERS = 4096  # from which on they are looked through
PUBLIC = Tenant(b"\xffpublic", b"public")  # what belongs to everyone; no text is its salt
TRUNCATING = ', or ask for truncation="auto", which drops its oldest part'
TEMPLATES = 64  # of modules that stand before the words of prompts, for which is remembered what to look for


class Admission:
    def __init__(
        self,
        model: Model,
        pages: Pages,
        max_len: int,
        config: EngineConfig,
        alive: Callable[[], set[Key]],
        seen: Callable[[Key, bytes], None] | None,
    ) -> None:
        """`alive`: the owners that something is cached for. `seen` is told the root and the salt of each tenant."""
        self._seen = seen
        self._model, self._pages, self._max_len, self._reuse, self._alive = model, pages, max_len, config.prefix_caching, alive
        self.owners: dict[Key, bytes] = {}  # of the roots and branches in the tree
        self._many_owners = MANY_OWNERS
        self.eos = tuple(token for token in model.tokenizer.eos if 0 <= token < model.config.vocab_size)  # files may name others
        self._seeds = random.Random(config.seed)
        self._templates: dict[tuple[Lineage, bool, tuple[Run, ...]], tuple[Want, ...]] = {}

    def rows(self, request: Request, cut: Cut | None = None) -> list[Row]:
        """One for each answer. `cut`: what was dropped of the prompt, if the request says so."""
        params = request.params
        check_share(request.repair)
        before, own, at = self._apart(request)
        ends = bool(before) and before[-1].end > at
        self.check_runs(before)
        alone = request.score and params.max_tokens == 1  # the one token behind a prompt that is scored is not computed
        whole = bool(before) or request.score or cut is not None  # no part of it can be dropped
        self.check_prompt(own, at + len(own), whole=whole, room=0 if alone else 1)
        prompt = compact(())
        for run in before:
            prompt.frombytes(run.packed)
        imported = len(prompt) - ends
        prompt[imported:] = compact(own)
        blocked = (*self.eos, *(params.stop_token_ids or ()))
        check(params, self._model.config.vocab_size, blocked if request.constraint is None else ())  # what is complete ends before, too
        may_be_cut = cut is not None or request.truncation is not None
        last = self.last(own, params.max_tokens, at, self.pages_of(before), is_cut=may_be_cut and not before, whole=whole)
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(63)
        lineage = self.lineage(request.tenant, request.public)
        tenant = lineage.owner
        asked = self._wants(lineage, before, ends)
        self.owners |= {want.lineage.owner: request.tenant.owner for want in asked}
        foreign = any(not want.exact for want, run in zip(asked, before, strict=True) if run.origin)
        repair = request.repair if foreign else 0.0
        if before or at:
            placed = Origin(tuple([want.run for want in asked]), at)
            lineage = Lineage.of(repair_key(tenant, before, at, repair) if repair else placed.key(tenant))
            self.owners[lineage.owner] = request.tenant.owner
        if repair:  # the row of a plain prompt, but for where its states come from
            check_gaps(before, at + ends)
            asked = tuple(want for want, run in zip(asked, before, strict=True) if run.origin)
            last, at, imported = self.last(prompt, params.max_tokens, 0, self.pages_of(before)), 0, 0
        trace = [] if before or at else self._trace(prompt, request.tenant.owner)
        rows = [
            Row(request.request_id, index, prompt, params, seed + index, lineage, last, tenant, blocked, imported=imported)
            for index in range(params.n)
        ]
        for row in rows:
            row.scored = [] if request.score else None
            row.constraint = request.constraint() if request.constraint is not None else None
            row.trace, row.at, row.wants, row.repair = trace, at, asked, repair
            if cut is not None:
                row.truncated, row.miss = cut.told(row.foreign), cut.miss
        return rows

    def _wants(self, lineage: Lineage, before: Sequence[Run], ends: bool) -> tuple[Want, ...]:
        """What stands before a prompt's own tokens. Prompts that import the same modules look for the same; what is left of a conversation
        that was cut is its own."""
        name = lineage, ends, tuple(before)
        found = self._templates.get(name)
        if found is None:
            found = wants(lineage.owner, before, self._pages.page_size, plain=lineage, ends=ends)
            if found and not any(run.origin is None or run.origin.before for run in before):
                if len(self._templates) >= TEMPLATES:
                    self._templates.clear()
                self._templates[name] = found
        return found

    def _apart(self, request: Request) -> tuple[list[Run], list[int], int]:
        """What stands before the tokens that are computed with a request, those, and their position. An answer needs a token that is
        computed: of a prompt that ends with a module it is the module's last."""
        runs, prompt = [run for run in request.runs if len(run)], list(request.prompt)
        if runs:
            self._check_runs(request, runs)
        if runs and not prompt and runs[-1].origin is None:
            *runs, own = runs
            prompt, at = list(own.tokens), own.position
        elif runs and not prompt:
            prompt, at = [runs[-1].tokens[-1]], runs[-1].end - 1
        else:
            at = request.position if request.position is not None else runs[-1].end if runs else 0
        if len(runs) == 1 and runs[0].is_plain and at <= runs[0].end:  # as if it had been asked for as tokens
            return [], [*runs[0].tokens[:at], *prompt], 0
        return runs, prompt, at

    def _check_runs(self, request: Request, runs: Sequence[Run]) -> None:
        if not self._reuse:
            raise InvalidOption("prefix_caching is off, so the states of modules have no place; turn it on")
        if request.score:
            raise InvalidPrompt("the logprobs of a prompt made of modules are not its own; ask for them with the text as a plain prompt")
        if self._has_learned_positions and any(run.shift for run in runs):
            run = next(run for run in runs if run.shift)
            raise InvalidPrompt(
                f"a module encoded at position {run.position - run.shift} was asked for at {run.position}, but this model's positions are "
                'learned and cannot move; use layout="fixed"'
            )
        for one, other in pairwise(runs):
            if other.position < one.end:
                raise InvalidPrompt(f"a run at position {other.position} begins inside the one before it, which ends at {one.end}")
        if request.prompt and request.position is not None and request.position < runs[-1].end:
            raise InvalidPrompt(f"tokens at position {request.position} begin inside the run before them, which ends at {runs[-1].end}")

    @property
    def _has_learned_positions(self) -> bool:
        geometry = self._model.decoder.geometry
        return geometry.freqs is None and geometry.slopes is None

    @property
    def cannot_move(self) -> RecomputeReason | None:
        """Why states cannot be read at other positions, if they cannot."""
        return "off" if not self._reuse else "positions" if self._has_learned_positions else None

    def tenant(self, tenant: Tenant) -> Key:
        """The root of what a tenant has."""
        key = root_key(self._model.digest, tenant.salt)
        self.owners[key] = tenant.owner
        if self._seen is not None:
            self._seen(key, tenant.salt)
        return key

    def lineage(self, tenant: Tenant, public: int) -> Lineage:
        if len(self.owners) > self._many_owners:
            self._forget_owners()
        own = self.tenant(tenant)  # behind that: nothing is cached for it yet
        pages = public // self._pages.page_size
        return Lineage(root_key(self._model.digest, PUBLIC.salt), own, pages) if pages else Lineage.of(own)

    def _trace(self, prompt: Sequence[int], owner: bytes) -> list[Key]:
        size, lineage = self._pages.page_size, Lineage.of(root_key(self._model.digest, b"owner" + owner))
        keys: list[Key] = []
        extend_keys(keys, lineage, prompt, size)
        left = prompt[len(keys) * size :]
        return [*keys, page_key(keys[-1] if keys else lineage.root, left)] if left else keys

    def _forget_owners(self) -> None:
        """Clients choose salts, so there may be any number of them: those that nothing is cached for are dropped."""
        alive = self._alive()
        self.owners = {key: whose for key, whose in self.owners.items() if key in alive}
        self._many_owners = 2 * len(self.owners) + MANY_OWNERS

    def pages_of(self, runs: Sequence[Run]) -> int:
        return pages_of(runs, self._pages)

    # ---- checks

    def check_tokens(self, prompt: Sequence[int]) -> None:
        if not prompt:
            raise InvalidPrompt("the prompt is empty; it needs at least one token")
        vocab = self._model.config.vocab_size
        if not are_tokens(prompt, vocab):
            wrong = next(token for token in prompt if type(token) is not int or not 0 <= token < vocab)
            raise InvalidPrompt(f"{wrong!r} is no token of this model; tokens are whole numbers from 0 to {vocab - 1}")

    def check_runs(self, runs: Iterable[Run]) -> None:
        """What was found to be tokens once is not looked at again."""
        for run in runs:
            if not run.is_of(self._model.config.vocab_size):
                self.check_tokens(run.tokens)

    def check_prompt(self, prompt: Sequence[int], length: int, *, whole: bool = True, room: int = 1) -> None:
        """`whole`: no part of it can be dropped. `room`: tokens that must fit behind it."""
        self.check_tokens(prompt)
        if length + room > self._max_len:
            way = "" if whole else TRUNCATING
            raise PromptTooLong(
                f"the prompt has {length} tokens and the context holds {self._max_len}{', one of them for the answer' if room else ''}; "
                f"shorten the prompt by {counted(length + room - self._max_len, 'token')}{way}"
            )

    def last(self, prompt: Sequence[int], max_tokens: int | None, at: int, taken: int, *, is_cut: bool = False, whole: bool = True) -> int:
        """How long prompt and answer may become together, from a position on and beside so many pages of what stands before. `is_cut`: or
        may be, so that they fit, and as with the context, an answer may then be shorter than it was asked for."""
        slots = (self._pages.count - taken) * self._pages.page_size
        room = self._max_len - at
        last = room if max_tokens is None else min(room, len(prompt) + max_tokens)
        if (max_tokens is None or is_cut) and len(prompt) < slots:
            return min(last, slots)
        if last > slots:
            needed = last + taken * self._pages.page_size
            way = "lower max_tokens" if len(prompt) < slots else "shorten the prompt" + ("" if whole else TRUNCATING)
            raise PoolTooSmall(
                f"the request may need {needed} tokens of KV cache and the pool has {self._pages.count * self._pages.page_size}; "
                f"raise kv_cache_tokens to at least {needed}, or {way}"
            )
        return last

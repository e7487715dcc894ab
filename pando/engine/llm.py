"""The offline interface, with the conventions of vLLM's class of the same name."""

import itertools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any
from weakref import WeakValueDictionary

import torch

from ..config import Attention, CodecName, Device, DType, EngineConfig, KVDType, PolicyName, Quantization, check_names
from ..errors import Closed, InvalidOption, known_only
from ..markup.program import Prompt as Written
from ..markup.schema import Schema
from ..model.load import Model, load
from ..model.memory import allowed_cores
from .conversation import Messages, Rendering, Tools, conversations
from .engine import Engine
from .given import AnyPrompt, Given, Params, Structures, Truncating, each, each_prompt, each_structure, how, plain, several, written
from .grammar import Grammars
from .lock import Lock
from .outputs import append, begun
from .pace import measure_before_choosing
from .request import Request, RequestOutput, SamplingParams, Span, StructuredOutputsParams, Tenant, TokenEvent
from .schemas import Prompt, Schemas
from .sizing import context_of
from .stream import Inbox, Stream


def loaded(config: EngineConfig) -> Model:
    """Options that the model is not made for are refused before its weights are read."""
    how = {"device": config.device, "dtype": config.dtype, "quantization": config.quantization}
    return load(config.model, **how, compiled=config.native, check=lambda facts: context_of(facts, config))


@known_only(check_names)
class LLM:
    """A model and its cache. What one call computed, the next one reuses."""

    def __init__(
        self,
        model: str | os.PathLike[str] = EngineConfig.model,
        *,
        device: Device = EngineConfig.device,
        dtype: DType = EngineConfig.dtype,
        quantization: Quantization = EngineConfig.quantization,
        kv_dtype: KVDType = EngineConfig.kv_dtype,
        max_model_len: int | None = EngineConfig.max_model_len,
        max_num_seqs: int | None = EngineConfig.max_num_seqs,
        max_num_batched_tokens: int = EngineConfig.max_num_batched_tokens,
        page_size: int = EngineConfig.page_size,
        kv_cache_tokens: int | None = EngineConfig.kv_cache_tokens,
        gpu_memory_utilization: float = EngineConfig.gpu_memory_utilization,
        prefix_caching: bool = EngineConfig.prefix_caching,
        seed: int = EngineConfig.seed,
        threads: int | None = EngineConfig.threads,
        attention: Attention = EngineConfig.attention,
        native: bool = EngineConfig.native,
        cuda_graphs: bool = EngineConfig.cuda_graphs,
        overlap: bool | None = EngineConfig.overlap,
        cache_salt: str = EngineConfig.cache_salt,
        host_gib: float | None = EngineConfig.host_gib,
        disk_gib: float | None = 0,  # a library writes nothing to disk unless it is told to
        disk_dir: str | None = EngineConfig.disk_dir,
        remote: str | None = EngineConfig.remote,
        ttl: int | None = EngineConfig.ttl,
        policy: PolicyName = EngineConfig.policy,
        store_codec: CodecName = EngineConfig.store_codec,
    ) -> None:
        config = EngineConfig(
            model=os.fspath(model) if isinstance(model, os.PathLike) else model,
            device=device,
            dtype=dtype,
            quantization=quantization,
            kv_dtype=kv_dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            page_size=page_size,
            kv_cache_tokens=kv_cache_tokens,
            gpu_memory_utilization=gpu_memory_utilization,
            prefix_caching=prefix_caching,
            seed=seed,
            threads=threads,
            attention=attention,
            native=native,
            cuda_graphs=cuda_graphs,
            overlap=overlap,
            cache_salt=cache_salt,
            host_gib=host_gib,
            disk_gib=disk_gib,
            disk_dir=disk_dir,
            remote=remote,
            ttl=ttl,
            policy=policy,
            store_codec=store_codec,
        )
        self._start(config, None)

    @classmethod
    def from_config(cls, config: EngineConfig, model: Model | None = None) -> "LLM":
        """From options that are already collected, and a model that may be loaded already."""
        self = cls.__new__(cls)
        self._start(config, model)
        return self

    def _start(self, config: EngineConfig, model: Model | None) -> None:
        if config.threads is not None:
            _use_threads(config.threads)
        elif (cores := allowed_cores()) < torch.get_num_threads():
            torch.set_num_threads(max(1, int(cores)))
        self.config = config
        self.engine = Engine(model or loaded(config), config)
        measure_before_choosing(self.engine)
        self.tokenizer = self.engine.model.tokenizer
        self._grammars = Grammars(self.tokenizer, self.engine.model.config.vocab_size, self.tokenizer.eos)
        self._ids = itertools.count()
        self._lock = Lock(lambda: self.engine.whole.may_break)  # one thread at a time steps the engine, and finds tokens for all
        self._tenant = Tenant(config.cache_salt.encode())
        self.schemas = Schemas(self.engine, encoder=self._make)
        self._inboxes = WeakValueDictionary[str, Inbox]()  # by request: whoever steps the engine, nobody's tokens are lost
        self._closed = False

    def close(self) -> None:
        """Lets what is on its way to disk arrive there. Needed only where a disk or a remote tier is in use. Nothing is answered any more,
        and a stream that has not ended raises Closed."""
        if self._lock.is_ours:  # what a process was forked from closes it
            with self._lock:
                self._closed = True
                self.engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = False,
        truncation: Truncating = "disabled",
        drop: Sequence[Span] = (),
        structured_outputs: Structures = None,
    ) -> list[RequestOutput]:
        """Answers every prompt, together. A prompt that cannot be answered is refused before any is begun. `drop`: parts of each prompt to
        leave out. `structured_outputs`: what the answers must follow."""
        asked, cut = several(prompts), how(truncation)
        texts = [written(prompt) for prompt in asked]
        given = self._constrained([one._replace(truncation=cut, drop=drop) for one in each_prompt(asked, self._encode)], structured_outputs)
        return self._finish(given, texts, sampling_params, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = False,
        truncation: Truncating = "disabled",
        structured_outputs: Structures = None,
        tools: Tools | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation, or several together. `tools`: functions that the model may call; the calls of an answer are in its
        text, as the model wrote them, and in its `tool_calls`."""
        rendering, asked = Rendering(self.tokenizer, tools, chat_template, chat_template_kwargs), conversations(messages)
        params = [rendering.params(one) for one in each(sampling_params, len(asked))]
        texts = each_prompt(asked, rendering.text)
        window = self.engine.truncations.window
        parts = zip(asked, texts, params, strict=True)
        given = [rendering.given(conversation, text, one.max_tokens, truncation, window) for conversation, text, one in parts]
        outputs = self._finish(self._constrained(given, structured_outputs), texts, params, use_tqdm)
        rendering.find_calls(outputs)
        return outputs

    def stream(
        self,
        prompt: AnyPrompt,
        sampling_params: SamplingParams | None = None,
        *,
        truncation: Truncating = "disabled",
        structured_outputs: StructuredOutputsParams | None = None,
    ) -> Iterator[TokenEvent]:
        """The tokens of one prompt as they come. Closing the iterator cancels the request."""
        given, [params] = self._encode(prompt)._replace(truncation=how(truncation)), each(sampling_params, 1)
        [given] = self._constrained([given], structured_outputs)
        return self._stream(self._request(given, params))

    def _make(self, schema: Schema) -> None:
        """Encodes what is not cached of a schema, as many modules at a time as fit into a step."""
        with self._lock:
            total = self.engine.encode(schema.stored, self._tenant)
            progress = _Progress(total, total > 1 and sys.stderr.isatty(), "module")
            while len(self.engine.scheduler.makers):
                before = len(self.engine.scheduler.makers)
                self._step()
                for _ in range(before - len(self.engine.scheduler.makers)):
                    progress.advance(True)
            progress.close()

    def stream_chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        truncation: Truncating = "disabled",
        structured_outputs: StructuredOutputsParams | None = None,
        tools: Tools | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[TokenEvent]:
        rendering = Rendering(self.tokenizer, tools, chat_template, chat_template_kwargs)
        [params] = [rendering.params(one) for one in each(sampling_params, 1)]
        text, window = rendering.text(messages), self.engine.truncations.window
        given = rendering.given(messages, text, params.max_tokens, truncation, window)
        [given] = self._constrained([given], structured_outputs)
        return self._stream(self._request(given, params))

    def _constrained(self, prompts: Sequence[Given], wanted: Structures) -> list[Given]:
        makers = [None if one is None else self._grammars.of(one) for one in each_structure(wanted, len(prompts))]
        return [prompt._replace(constraint=maker) for prompt, maker in zip(prompts, makers, strict=True)]

    def score(self, prompt: AnyPrompt) -> list[float]:
        """The logprob of each token after the first, given those before it."""
        request = self._request(self._encode(prompt), SamplingParams(max_tokens=1, temperature=0), score=True)
        with closing(self._stream(request)) as events:
            return [value for event in events for value in event.prompt_logprobs or ()]

    def _stream(self, request: Request) -> Stream:
        return Stream(request, self._open, self._fill, self._close)

    def _finish(self, prompts: Sequence[Given], texts: Sequence[str | None], params: Params, use_tqdm: bool) -> list[RequestOutput]:
        requests = [self._request(prompt, one) for prompt, one in zip(prompts, each(params, len(prompts)), strict=True)]
        outputs = {r.request_id: begun(r, text) for r, text in zip(requests, texts, strict=True)}
        left = len(requests)
        try:
            inbox = self._open(requests)
            progress = _Progress(left, use_tqdm)
            while left:
                self._fill(inbox)
                event = inbox.popleft()
                finished = append(outputs[event.request_id], event)
                progress.advance(finished)
                left -= finished
            progress.close()
        finally:
            self._close(requests)
        return list(outputs.values())

    def _open(self, requests: Sequence[Request]) -> Inbox:
        inbox = Inbox()

        def add(request: Request) -> None:
            self.engine.add(request)
            self._inboxes[request.request_id] = inbox

        with self._lock:
            self._check_open()
            each_prompt(requests, add)
        return inbox

    def _fill(self, inbox: Inbox) -> None:
        """Steps the engine until there is something in the inbox. What comes for others waits in theirs."""
        while not inbox:
            with self._lock:
                if not inbox:  # another thread may have stepped it meanwhile
                    self._step()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("this LLM was closed, and answers no more; make another, or close it when everything is answered")

    def _step(self) -> None:
        self._check_open()
        for event in self.engine.step():  # whoever is interrupted (Ctrl-C) has handed over all of them
            if (inbox := self._inboxes.get(event.request_id)) is not None:
                inbox.append(event)
            else:
                self.engine.cancel(event.request_id)  # whoever asked was interrupted, and could not

    def _close(self, requests: Sequence[Request]) -> None:
        if not self._lock.is_ours:  # a stream that a forked process has, too
            return
        with self._lock:
            for request in requests:
                self.engine.cancel(request.request_id)
                self._inboxes.pop(request.request_id, None)

    def _request(self, given: Given, params: SamplingParams, score: bool = False) -> Request:
        return Request(
            f"request-{next(self._ids)}",
            given.tokens,
            params,
            self._tenant,
            score=score,
            constraint=given.constraint,
            runs=given.runs,
            position=given.position,
            repair=given.repair,
            truncation=given.truncation,
            drop=given.drop,
        )

    def _encode(self, prompt: AnyPrompt) -> Given:
        if isinstance(prompt, Prompt | Written):
            with self._lock:
                return Given(*self.schemas.parts(prompt if isinstance(prompt, Prompt) else self.schemas.made(prompt)))
        found = plain(prompt)
        return Given(self.tokenizer.encode(found) if isinstance(found, str) else found)


def _use_threads(count: int) -> None:
    cores = os.cpu_count() or 1
    if count > 2 * cores:
        raise InvalidOption(
            f"threads is {count} on a machine of {cores} cores, which would only slow each other down; use at most {2 * cores}"
        )
    torch.set_num_threads(count)


class _Progress:
    def __init__(self, total: int, shown: bool, unit: str = "request") -> None:
        self._bar: Any = None
        if shown:
            from tqdm import tqdm

            self._bar = tqdm(total=total, unit=unit)

    def advance(self, finished: bool) -> None:
        if self._bar is not None and finished:
            self._bar.update(1)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

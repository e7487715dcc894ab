"""The offline interface, with the conventions of vLLM's class of the same name."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..config import Attention, Device, DType, EngineConfig
from ..errors import InvalidPrompt, InvalidSampling
from ..model.load import Model, load
from .engine import Engine
from .request import CompletionOutput, Request, RequestOutput, SamplingParams, TokenEvent

Prompt = str | Sequence[int] | Mapping[str, Any]  # text; tokens; {"prompt": text} or {"prompt_token_ids": tokens}
Messages = Sequence[Mapping[str, Any]]
Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model and its cache. What one call computed, the next one reuses."""

    def __init__(
        self,
        model: str = EngineConfig.model,
        *,
        device: Device = EngineConfig.device,
        dtype: DType = EngineConfig.dtype,
        max_model_len: int | None = EngineConfig.max_model_len,
        max_num_seqs: int = EngineConfig.max_num_seqs,
        max_num_batched_tokens: int = EngineConfig.max_num_batched_tokens,
        page_size: int = EngineConfig.page_size,
        kv_cache_tokens: int | None = EngineConfig.kv_cache_tokens,
        prefix_caching: bool = EngineConfig.prefix_caching,
        seed: int = EngineConfig.seed,
        threads: int | None = EngineConfig.threads,
        attention: Attention = EngineConfig.attention,
        cache_salt: str = EngineConfig.cache_salt,
    ) -> None:
        config = EngineConfig(
            model=model,
            device=device,
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            page_size=page_size,
            kv_cache_tokens=kv_cache_tokens,
            prefix_caching=prefix_caching,
            seed=seed,
            threads=threads,
            attention=attention,
            cache_salt=cache_salt,
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
            torch.set_num_threads(config.threads)
        self.config = config
        self.engine = Engine(model or load(config.model, device=config.device, dtype=config.dtype), config)
        self.tokenizer = self.engine.model.tokenizer
        self._ids = (f"request-{number}" for number in itertools.count())
        self._salt = config.cache_salt.encode()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None, *, use_tqdm: bool = False
    ) -> list[RequestOutput]:
        """Answers every prompt, together. A prompt that cannot be answered is refused before any is begun."""
        several = _several(prompts)
        texts = [_text(prompt) for prompt in several]
        return self._finish([self._encode(prompt) for prompt in several], texts, sampling_params, use_tqdm)

    def chat(
        self, messages: Messages | Sequence[Messages], sampling_params: Params = None, *, use_tqdm: bool = False
    ) -> list[RequestOutput]:
        """Answers one conversation, or several together."""
        several = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        texts = [self.tokenizer.chat(conversation) for conversation in several]  # type: ignore[arg-type]
        return self._finish([self.tokenizer.encode(text) for text in texts], texts, sampling_params, use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[TokenEvent]:
        """The tokens of one prompt as they come. Closing the iterator cancels the request."""
        return self._stream(self._request(self._encode(prompt), sampling_params or SamplingParams()))

    def stream_chat(self, messages: Messages, sampling_params: SamplingParams | None = None) -> Iterator[TokenEvent]:
        return self.stream(self.tokenizer.chat(messages), sampling_params)

    def score(self, tokens: Sequence[int]) -> list[float]:
        """The logprob of each token after the first, given those before it."""
        request = self._request(tokens, SamplingParams(max_tokens=1, temperature=0), score=True)
        return [value for event in self._stream(request) for value in event.prompt_logprobs or ()]

    def _stream(self, request: Request) -> Iterator[TokenEvent]:
        self.engine.add(request)
        return self._events(request)

    def _events(self, request: Request) -> Iterator[TokenEvent]:
        open_answers = request.params.n
        try:
            while open_answers:
                for event in self.engine.step():
                    if event.request_id == request.request_id:
                        open_answers -= event.finish_reason is not None
                        yield event
        finally:
            self.engine.cancel(request.request_id)

    def _finish(self, prompts: Sequence[list[int]], texts: Sequence[str | None], params: Params, use_tqdm: bool) -> list[RequestOutput]:
        requests = [self._request(prompt, one) for prompt, one in zip(prompts, _each(params, len(prompts)), strict=True)]
        outputs = {r.request_id: _output(r, text) for r, text in zip(requests, texts, strict=True)}
        try:
            for request in requests:
                self.engine.add(request)
            progress = _Progress(len(requests), use_tqdm)
            while any(not output.finished for output in outputs.values()):
                for event in self.engine.step():
                    if event.request_id in outputs:
                        progress.advance(_append(outputs[event.request_id], event))
            progress.close()
        finally:
            for request in requests:
                self.engine.cancel(request.request_id)
        return list(outputs.values())

    def _request(self, prompt: Sequence[int], params: SamplingParams, score: bool = False) -> Request:
        return Request(next(self._ids), prompt, params, self._salt, score)

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                return list(prompt["prompt_token_ids"])
            if not isinstance(prompt.get("prompt"), str):
                raise InvalidPrompt(f"a prompt given as a mapping needs 'prompt' or 'prompt_token_ids'; found {sorted(prompt)}")
            prompt = prompt["prompt"]
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)


class _Progress:
    def __init__(self, total: int, shown: bool) -> None:
        self._bar: Any = None
        if shown:
            from tqdm import tqdm

            self._bar = tqdm(total=total, unit="request")

    def advance(self, finished: bool) -> None:
        if self._bar is not None and finished:
            self._bar.update(1)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _several(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """One prompt or many? A list of whole numbers is one prompt of tokens."""
    if isinstance(prompts, str | Mapping) or (len(prompts) and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


def _text(prompt: Prompt) -> str | None:
    if isinstance(prompt, Mapping):
        return prompt.get("prompt")
    return prompt if isinstance(prompt, str) else None


def _each(params: Params, count: int) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise InvalidSampling(f"{len(params)} sampling params for {count} prompts; give one for all, or one for each")
    return params


def _output(request: Request, text: str | None) -> RequestOutput:
    wants = request.params.logprobs is not None
    answers = [CompletionOutput(index, logprobs=[] if wants else None, cumulative_logprob=0.0 if wants else None) for index in range(request.params.n)]
    return RequestOutput(request.request_id, text, list(request.prompt), answers)


def _append(output: RequestOutput, event: TokenEvent) -> bool:
    """Adds a token to its answer; says whether that was the request's last."""
    answer = output.outputs[event.index]
    if event.finish_reason != "error":
        answer.token_ids.append(event.token)
    answer.text += event.text
    if event.logprobs is not None and answer.logprobs is not None and answer.cumulative_logprob is not None:
        answer.logprobs.append(event.logprobs)
        answer.cumulative_logprob += event.logprobs[event.token].logprob
    answer.finish_reason, answer.stop_reason = event.finish_reason, event.stop_reason
    if event.index == 0:
        output.num_cached_tokens = event.num_cached_tokens
    output.finished = all(answer.finish_reason is not None for answer in output.outputs)
    return output.finished

"""Answers of the offline interface, put together from the tokens as they come."""

from .request import CompletionOutput, Request, RequestOutput, TokenEvent


def begun(request: Request, text: str | None) -> RequestOutput:
    answers = [CompletionOutput(index) for index in range(request.params.n)]
    if request.params.logprobs is not None:
        for answer in answers:
            answer.logprobs, answer.cumulative_logprob = [], 0.0
    before = [token for run in request.runs for token in run.tokens]
    return RequestOutput(request.request_id, text, [*before, *request.prompt], answers)


def append(output: RequestOutput, event: TokenEvent) -> bool:
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
        output.num_cached_tokens, output.reuse = event.num_cached_tokens, event.reuse
    output.finished = all(answer.finish_reason is not None for answer in output.outputs)
    return output.finished

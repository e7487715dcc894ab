"""`pando schema`: what a schema and a prompt come to with a model's tokenizer. No weights are loaded."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from .config import EngineConfig
from .engine.imports import wants
from .engine.words import Words
from .errors import InvalidOption, counted
from .kv.run import Run
from .markup.binding import Bound, bind
from .markup.outline import Module, every
from .markup.schema import Part, Schema, read_schema
from .model.config import ModelConfig
from .model.hub import ModelFiles, resolve
from .model.tokenizer import Tokenizer

LEFT = frozenset({"run", "module", "encode", "state", "notes"})  # columns of words; numbers stand to the right


def check(config: EngineConfig, file: Path, prompt: Path | None) -> Iterator[str]:
    """One line on the schema; with a prompt, its layout as a table."""
    files = resolve(config.model)
    schema = _schema(config, files, file)
    yield f"{file}: {_summary(schema)}"
    if prompt is not None:
        bound = bind(schema, read_prompt(prompt), file=str(prompt))
        yield from _layout(bound)
        yield from advice(bound, Tokenizer.from_directory(files.directory))


def show(config: EngineConfig, file: Path) -> Iterator[str]:
    """The modules of a schema, with what their states take."""
    files = resolve(config.model)
    schema = _schema(config, files, file)
    dtype, token = _token_bytes(config, files)

    def size(runs: Iterable[Run]) -> str:
        pages = sum(-(-len(run) // config.page_size) for run in runs)
        return f"{pages * config.page_size * token / 2**20:.2f} MiB"

    yield _summary(schema)
    modules = list(every(schema.outline.root))
    texts = schema.modules[: len(schema.modules) - len(modules)]
    rows = [_row(part, size(part.runs), "") for part in texts]
    rows += [
        _row(part, size(part.runs), _notes(schema, module)) for part, module in zip(schema.modules[len(texts) :], modules, strict=True)
    ]
    yield from _table(["module", "encode", "tokens", "bytes", "notes"], rows)
    for scaffold in schema.scaffolds:
        yield f"scaffold {' '.join(scaffold.paths)}: {counted(scaffold.tokens, 'token')} once more, {size(scaffold.runs)}"
    yield f"all of it takes {size(schema.stored)} of KV cache in {dtype}, in whole pages of {config.page_size} tokens"


def _row(part: Part, size: str, notes: str) -> list[str]:
    return [part.path, part.encode, str(part.tokens), size if part.cached else "none", notes]


def _notes(schema: Schema, module: Module) -> str:
    notes = [] if module.cached else ["computed with each prompt"]
    if (union := schema.unions.get(module)) is not None:
        others = ", ".join(member.name for member in union.members if member is not module)
        notes.append(("the default, or " if union.default is module else "or ") + others if others else "alone in its union")
    for name, param in module.params.items():
        notes.append(f"{name}: up to {counted(param.length, 'token')}" + ("" if param.default is None else ", has a default"))
    return "; ".join(notes)


def _layout(bound: Bound) -> Iterator[str]:
    rows = []
    for run, name in zip(bound.runs, bound.names, strict=True):
        moved = f", moved by {run.shift:+}" if run.shift else ""
        state = "new" if run.origin is None else "cached" + moved
        rows.append([name, str(len(run)), f"{run.position}-{run.end - 1}", state])
    yield from _table(["run", "tokens", "positions", "state"], rows)
    known, new = bound.module_tokens, bound.new_tokens
    yield f"{known + new} tokens, {known} from the schema and {new} new; {_kind(bound)}"


def _kind(bound: Bound) -> str:
    """As answers tell it: what is read behind a hole is not the plain prompt, and yet no approximation of what stands there."""
    if bound.exact:
        return "exact: it answers as the plain prompt does"
    if any(not want.exact for want in wants(b"", bound.runs, 1)):
        return "modular: some modules have not seen what stands before them"
    return "exact but for its holes, which the plain prompt does not have"


def advice(bound: Bound, tokenizer: Tokenizer) -> Iterator[str]:
    """What is no error, and hardly meant."""
    if not bound.roles and tokenizer.template() is not None:
        yield "note: there are no roles, so the model's chat template is not used; it answers questions in <user> as in a chat"


def _summary(schema: Schema) -> str:
    count, tokens = sum(1 for _ in every(schema.outline.root)), sum(part.tokens for part in schema.modules)
    size = f"{counted(count, 'module')}, {counted(tokens, 'token')}"
    return f"schema {schema.name}: {size}; layout {schema.layout}, encode {schema.encode}, order {schema.order}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        cells = [cell.ljust(width) if name in LEFT else cell.rjust(width) for cell, width, name in zip(row, widths, head, strict=True)]
        yield "  ".join(cells).rstrip()


# ---- files and models


def _schema(config: EngineConfig, files: ModelFiles, file: Path) -> Schema:
    facts = ModelConfig.from_file(files.config)
    words = Words(Tokenizer.from_directory(files.directory))
    movable = facts.rope is not None or facts.positions == "alibi"
    max_len = min(config.max_model_len or facts.max_positions, facts.max_positions)
    return read_schema(read_pml(file), words, movable=movable, max_len=max_len, directory=file.parent, file=str(file))


def _token_bytes(config: EngineConfig, files: ModelFiles) -> tuple[str, int]:
    """In which type keys and values are held here, and what those of one token take."""
    from torch import float8_e4m3fn

    from .kv.pool import PagePool
    from .model.load import choose_device, choose_dtype

    facts = ModelConfig.from_file(files.config)
    dtype = float8_e4m3fn if config.kv_dtype == "fp8" else choose_dtype(config.dtype, choose_device(config.device))
    return str(dtype).removeprefix("torch."), PagePool.page_bytes(1, facts.layers, facts.kv_heads, facts.head_dim, dtype)


def read_pml(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise InvalidOption(f"{file} cannot be read ({error.strerror}); name a PML file") from error


def read_prompt(file: Path) -> bytes:
    return sys.stdin.buffer.read() if str(file) == "-" else read_pml(file)

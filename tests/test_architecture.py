"""Who may import whom, read from the syntax trees: lazy imports count like any other."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "pando"

# A part of Pando and the parts it may import; its own part always. Files directly in pando/ are parts of their own.
MAY_IMPORT = {
    "kernels": set(),
    "errors": set(),
    "kv": {"errors"},
    "store": {"kv", "kernels", "errors"},
    "markup": {"kv", "errors"},
    "model": {"kv", "kernels", "errors"},
    "flags": {"errors"},
    "config": {"flags", "errors"},
    "engine": {"store", "model", "markup", "kv", "kernels", "config", "errors"},
    "bench": {"__init__", "engine", "store", "model", "markup", "kv", "kernels", "config", "flags", "errors"},
    "server": {"__init__", "engine", "store", "model", "markup", "kv", "kernels", "config", "errors"},
    "chat": {"engine", "errors"},
    "schema_cli": {"engine", "model", "markup", "kv", "config", "errors"},
    "cache_cli": {"server", "store", "model", "kv", "config", "errors"},
    "arguments": {"__init__", "config", "flags", "errors"},
    "cli": {"__init__", "arguments", "chat", "schema_cli", "cache_cli", "server", "bench", "engine", "model", "config", "flags", "errors"},
    "__init__": {"engine", "errors"},
    "__main__": {"cli"},
}
TORCH_FREE = (
    *("kv.segment", "kv.run", "kv.stem", "kv.tree", "kv.plan", "kv.pages"),
    *("store.policy", "store.ledger"),
    *("engine.request", "engine.words", "engine.pins", "engine.imports", "engine.row", "engine.scheduler", "engine.facts"),
    *("markup.binding", "markup.library", "markup.layout", "markup.pml", "markup.schema"),
    *("config", "flags", "arguments", "cli", "cache_cli", "chat", "errors"),
)
BRINGS_TORCH = {"torch", "triton", "transformers", "accelerate"}
CORE = {"kernels", "kv", "model", "engine"}  # a GPU host without the other dependencies imports these
CORE_DEPENDENCIES = {"torch", "numpy", "triton", "safetensors", "tokenizers"}
STDLIB_ONLY = {"errors", "flags", "config", "arguments", "cli", "chat", "__init__", "__main__"}
RUNS_FOREIGN_CODE = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
SAYS_NOTHING = ("Manager", "Handler", "Base", "Mixin", "Impl", "Helper")
SAYS_NOTHING_FILES = {"utils", "util", "helpers", "helper", "common", "misc"}


@dataclass(frozen=True)
class Import:
    target: str  # dotted: pando.kv.tree, torch.nn
    line: int
    on_load: bool  # runs when the module is imported


def name_of(file: Path, package: Path) -> str:
    """`kv.tree`, `engine.__init__`, `cli`."""
    return ".".join(file.relative_to(package).with_suffix("").parts)


def part_of(module: str) -> str:
    return module.split(".")[0]


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


@cache
def imports(file: Path, package: Path) -> tuple[Import, ...]:
    return tuple(_imports(tree_of(file), ("pando", *file.relative_to(package).parent.parts), True))


def _imports(node: ast.AST, folder: tuple[str, ...], on_load: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, on_load) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            origin = [*folder[: len(folder) - child.level + 1]] if child.level else []
            origin += child.module.split(".") if child.module else []
            yield from (Import(".".join([*origin, alias.name]), child.lineno, on_load) for alias in child.names)
        elif isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            yield from _imports(ast.Module(child.body, []), folder, False)
            yield from _imports(ast.Module(child.orelse, []), folder, on_load)
        else:
            lazy = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports(child, folder, on_load and not lazy)


def modules_run_by(target: str, package: Path) -> list[str]:
    """The modules of Pando that `import target` runs: every package on the way, then the module itself."""
    found, place = ["__init__"], package
    for word in target.split(".")[1:]:
        place = place / word
        if (place / "__init__.py").exists():
            found.append(name_of(place / "__init__.py", package))
        elif place.with_suffix(".py").exists():
            found.append(name_of(place.with_suffix(".py"), package))
    return found


def file_of(module: str, package: Path) -> Path:
    return package.joinpath(*module.split(".")).with_suffix(".py")


def upward_imports(package: Path) -> Iterator[str]:
    for file in sorted(package.rglob("*.py")):
        module = name_of(file, package)
        part = part_of(module)
        if part not in MAY_IMPORT:
            yield f"{module} is in no part that this test knows: add {part!r} to MAY_IMPORT, deliberately"
            continue
        for found in imports(file, package):
            if found.target.split(".")[0] != "pando":
                continue
            to = part_of(modules_run_by(found.target, package)[1]) if len(modules_run_by(found.target, package)) > 1 else "__init__"
            if to != part and to not in MAY_IMPORT[part]:
                yield f"{module}:{found.line} imports {found.target}, and {part} may not import {to}"


def foreign_imports(package: Path) -> Iterator[str]:
    for file in sorted(package.rglob("*.py")):
        module = name_of(file, package)
        part = part_of(module)
        for found in imports(file, package):
            root = found.target.split(".")[0]
            if root in sys.stdlib_module_names or root == "pando":
                continue
            if root == "transformers" and part != "bench":
                yield f"{module}:{found.line} imports transformers, which only bench is measured against"
            elif found.on_load and (part in STDLIB_ONLY or (part in CORE and root not in CORE_DEPENDENCIES)):
                yield f"{module}:{found.line} imports {root} on load: import it in the function that needs it"


def torch_in_torch_free(package: Path) -> Iterator[str]:
    for start in TORCH_FREE:
        if not file_of(start, package).exists():
            continue
        for found in imports(file_of(start, package), package):
            if brings_torch(found.target) and (found.on_load or part_of(start) not in STDLIB_ONLY):
                yield f"{start}:{found.line} imports {found.target}, and is to be free of torch"
        yield from _torch_behind(start, package)


def _torch_behind(start: str, package: Path) -> Iterator[str]:
    seen, waiting = {start}, [(module, f"{start} -> {module}") for module in modules_run_by("pando." + start, package)]
    while waiting:
        module, path = waiting.pop()
        if module != start and module in seen:
            continue
        seen.add(module)
        for found in imports(file_of(module, package), package):
            if not found.on_load:
                continue
            if brings_torch(found.target) and module != start:
                yield f"{path} imports {found.target} on load, and {start} is to be free of torch"
            elif found.target.split(".")[0] == "pando":
                waiting += [(m, f"{path} -> {m}") for m in modules_run_by(found.target, package) if m not in seen]


def brings_torch(target: str) -> bool:
    return target.split(".")[0] in BRINGS_TORCH or target == "safetensors.torch" or target.startswith("safetensors.torch.")


def dangerous_code(package: Path) -> Iterator[str]:
    for file in sorted(package.rglob("*.py")):
        module = name_of(file, package)
        for found in imports(file, package):
            if found.target.split(".")[0] in RUNS_FOREIGN_CODE or found.target == "torch.load":
                yield f"{module}:{found.line} imports {found.target}: it runs what a file says"
            if found.target.startswith("importlib.import_module") or found.target == "importlib":
                yield f"{module}:{found.line} imports importlib, which this test cannot read: write the import"
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.load":
                yield f"{module}:{node.lineno} uses torch.load: it runs what a file says"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"eval", "exec", "__import__"}:
                yield f"{module}:{node.lineno} calls {node.func.id}"
            if isinstance(node, ast.keyword) and node.arg in {"allow_pickle", "trust_remote_code"} and ast.unparse(node.value) != "False":
                yield f"{module}:{node.value.lineno} sets {node.arg}"


def empty_names(package: Path) -> Iterator[str]:
    for file in sorted(package.rglob("*.py")):
        module = name_of(file, package)
        if SAYS_NOTHING_FILES & set(module.split(".")):
            yield f"{module} says nothing about what is in it"
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.ClassDef) and (node.name.endswith(SAYS_NOTHING) or re.match("(Base|Abstract)[A-Z]", node.name)):
                yield f"{module}:{node.lineno} class {node.name} says nothing about what it is"
            if isinstance(node, ast.Global):
                yield f"{module}:{node.lineno} changes the module global {', '.join(node.names)}"


RULES = [upward_imports, foreign_imports, torch_in_torch_free, dangerous_code, empty_names]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_pando_breaks_no_rule(rule):
    assert list(rule(PACKAGE)) == []


def test_every_torch_free_module_is_there():
    assert [module for module in TORCH_FREE if not file_of(module, PACKAGE).exists()] == []


def test_torch_free_modules_load_without_torch():
    """The same rule as above, asked of the interpreter."""
    load = "; ".join(f"import pando.{module}" for module in TORCH_FREE)
    done = subprocess.run(
        [sys.executable, "-c", f"{load}; import sys; sys.exit('torch' in sys.modules)"],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_the_rules_allow_no_circle():
    for part, below in MAY_IMPORT.items():
        for other in below:
            assert part not in MAY_IMPORT[other], f"{part} and {other} may import each other"


@pytest.fixture
def planted(tmp_path):
    """A sound small package, and a function that adds lines to one of its files."""
    package = tmp_path / "pando"
    sound = {
        "__init__": "def __getattr__(name):\n    from .engine.step import Step\n    return Step",
        "errors": "class PandoError(Exception): ...",
        "kernels/maths": "import torch",
        "kv/tree": "from ..errors import PandoError",
        "kv/pool": "import torch\nfrom .tree import PandoError",
        "model/decoder": "import torch\nfrom ..kernels import maths\nfrom ..kv.pool import PandoError\ndef pull():\n    import gguf",
        "engine/request": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..model.decoder import pull",
        "engine/step": "from ..model import decoder\nfrom .request import TYPE_CHECKING\nclass Step: ...",
        "cli": "from .engine import request\nfrom . import errors",
    }
    for name, text in sound.items():
        file = package / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.parent != package:
            (file.parent / "__init__.py").touch()
        file.write_text(text + "\n")

    def plant(name, *lines):
        file = package / f"{name}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text((file.read_text() if file.exists() else "") + "\n".join(lines) + "\n")
        tree_of.cache_clear()
        imports.cache_clear()
        return package

    return plant


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_sound_package_breaks_no_rule(planted, rule):
    assert list(rule(planted("cli"))) == []


@pytest.mark.parametrize(
    ("rule", "name", "lines", "complaint"),
    [
        (upward_imports, "kv/tree", ["from ..engine.step import Step"], "kv may not import engine"),
        (upward_imports, "kv/tree", ["def late():", "    from ..engine import step"], "kv may not import engine"),
        (
            upward_imports,
            "kv/tree",
            ["class Late:", "    def late(self):", "        import pando.model.decoder"],
            "kv may not import model",
        ),
        (upward_imports, "kv/tree", ["from .. import model"], "kv may not import model"),
        (upward_imports, "kv/tree", ["from pando import LLM"], "kv may not import __init__"),
        (upward_imports, "kernels/maths", ["from ..errors import PandoError"], "kernels may not import errors"),
        (
            upward_imports,
            "model/decoder",
            ["import typing", "if typing.TYPE_CHECKING:", "    from ..engine import step"],
            "may not import engine",
        ),
        (upward_imports, "surprise/new", ["x = 1"], "no part that this test knows"),
        (foreign_imports, "kv/tree", ["import jinja2"], "imports jinja2 on load"),
        (
            foreign_imports,
            "model/decoder",
            ["try:", "    from huggingface_hub import x", "except ImportError: pass"],
            "huggingface_hub on load",
        ),
        (foreign_imports, "cli", ["import torch"], "imports torch on load"),
        (foreign_imports, "model/decoder", ["def late():", "    from transformers import x"], "only bench"),
        (torch_in_torch_free, "kv/tree", ["import torch"], "kv.tree:2 imports torch"),
        (torch_in_torch_free, "kv/tree", ["def late():", "    from torch import nn"], "kv.tree:3 imports torch.nn"),
        (torch_in_torch_free, "kv/tree", ["from safetensors.torch import load_file"], "safetensors.torch"),
        (torch_in_torch_free, "engine/request", ["from ..kv.pool import x"], "kv.pool imports torch on load"),
        (torch_in_torch_free, "kv/__init__", ["from .pool import x"], "kv.pool imports torch on load"),
        (torch_in_torch_free, "__init__", ["from .engine.step import Step"], "model.decoder imports torch on load"),
        (dangerous_code, "model/decoder", ["import pickle"], "imports pickle"),
        (dangerous_code, "model/decoder", ["def late():", "    from pickle import loads"], "imports pickle.loads"),
        (dangerous_code, "model/decoder", ["weights = torch.load('x')"], "uses torch.load"),
        (dangerous_code, "model/decoder", ["from torch import load"], "imports torch.load"),
        (dangerous_code, "model/decoder", ["eval('1')"], "calls eval"),
        (dangerous_code, "model/decoder", ["exec('1')"], "calls exec"),
        (dangerous_code, "model/decoder", ["import importlib"], "importlib"),
        (dangerous_code, "model/decoder", ["import numpy", "numpy.load('x', allow_pickle=True)"], "sets allow_pickle"),
        (empty_names, "engine/step", ["class CacheManager: ..."], "CacheManager"),
        (empty_names, "kv/utils", ["x = 1"], "kv.utils says nothing"),
        (empty_names, "kv/tree", ["def f():", "    global x", "    x = 1"], "changes the module global x"),
    ],
)
def test_a_planted_fault_is_found(planted, rule, name, lines, complaint):
    found = list(rule(planted(name, *lines)))
    assert any(complaint in one for one in found), found


def test_a_baseline_is_no_base_class(planted):
    assert list(empty_names(planted("bench/baseline", "class Baseline: ..."))) == []


def test_a_method_named_eval_is_no_fault(planted):
    assert list(dangerous_code(planted("model/decoder", "decoder.eval()"))) == []

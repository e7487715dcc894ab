"""Answers the prompts of an example. Run it with: .venv/bin/python examples/run.py trip"""

import sys
from pathlib import Path

from pando import LLM, Prompt, SamplingParams


def main(llm: LLM, folder: Path, tokens: int = 80) -> None:
    llm.schemas.add((folder / "schema.pml").read_text(encoding="utf-8"), file="schema.pml", directory=folder, eager=True)
    prompts = [Prompt(pml) for pml in (folder / "prompts.pml").read_text(encoding="utf-8").split("\n\n")]
    for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=tokens)):
        print(output.prompt)
        print(f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} tokens came from the cache.\n")
        print(output.outputs[0].text.strip(), end="\n\n")


if __name__ == "__main__":
    here = Path(__file__).parent
    names = sorted(folder.parent.name for folder in here.glob("*/schema.pml"))
    if sys.argv[1:] not in [[name] for name in names]:
        sys.exit(f"name one example of {', '.join(names)}; found {' '.join(sys.argv[1:]) or 'none'}")
    main(LLM(), here / sys.argv[1])

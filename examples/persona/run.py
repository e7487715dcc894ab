"""Answers the prompts of this folder. Run it with: python run.py"""

from pathlib import Path

from pando import LLM, Prompt, SamplingParams

HERE = Path(__file__).parent


def main(llm: LLM, tokens: int = 80) -> None:
    llm.schemas.add((HERE / "schema.pml").read_text(encoding="utf-8"), file="schema.pml", directory=HERE, eager=True)
    prompts = [Prompt(pml) for pml in (HERE / "prompts.pml").read_text(encoding="utf-8").split("\n\n")]
    for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=tokens)):
        print(output.prompt)
        print(f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} tokens came from the cache.\n")
        print(output.outputs[0].text.strip(), end="\n\n")


if __name__ == "__main__":
    main(LLM())

"""Make a recurrent model of transformers fast on this machine, tune it a little, and save it as transformers has it.

    python fast_pretrained.py state-spaces/mamba-130m-hf --text notes.txt

Needs `pip install -e '.[hub]'`. Without a name it takes a small Mamba with random weights and downloads nothing.
"""

import argparse
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, MambaConfig, MambaForCausalLM

from scanl import hub

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("name", nargs="?", help="a folder, or a model of the Hugging Face hub")
parser.add_argument("--text", type=Path, default=Path(__file__), help="to tune it on")
parser.add_argument("--length", type=int, default=512, help="tokens of the prompt")
parser.add_argument("--steps", type=int, default=5, help="of tuning")
parser.add_argument("--out", type=Path, default=Path("tuned"))


def seconds(model, prompt) -> float:
    model.eval()
    with torch.inference_mode():
        model(prompt)  # the first call compiles
        began = time.perf_counter()
        model(prompt)
        return time.perf_counter() - began


def main() -> None:
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.name is None:
        model = MambaForCausalLM(MambaConfig(hidden_size=128, num_hidden_layers=2, vocab_size=256))
        tokens = torch.tensor([list(options.text.read_bytes())])
    else:
        from transformers import AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(options.name)
        tokens = AutoTokenizer.from_pretrained(options.name)(options.text.read_text(), return_tensors="pt").input_ids
    tokens = tokens[:, : options.length]

    before = seconds(model, tokens)
    print(hub.accelerate(model))  # which modules run on scanl now; hub.restore(model) undoes it
    after = seconds(model, tokens)
    print(f"a prompt of {tokens.shape[1]} tokens: {before:.3f} s before, {after:.3f} s now")

    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(options.steps):
        loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.3f}")

    hub.restore(model)  # what is saved has the classes and names of transformers
    model.save_pretrained(options.out)
    print(f"saved in {options.out}: {type(model).__name__}.from_pretrained reads it, with or without scanl")


if __name__ == "__main__":
    main()

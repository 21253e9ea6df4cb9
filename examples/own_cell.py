"""A recurrence of your own in a hybrid of your own: write one step, and train it among other layers.

    python own_cell.py --steps 500

The cell is an oscillator per channel, which the input pushes. scanl compiles its loop and its gradient. Two of three
layers of the model are this cell; the third attends to the last 32 steps.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from scanl import ops, tasks
from scanl.layers import Layer
from scanl.learning import score
from scanl.models import LanguageModel, Stack

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=300)


@ops.cell(
    "x: B T D, speed: D, damping: D, state: B 2 D -> B T D",
    equation="v_t = a v_{t-1} - s y_{t-1} + tanh(x_t),  y_t = y_{t-1} + v_t",
    source="this script",
)
def oscillator(x: Tensor, speed: Tensor, damping: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One step: the position and the velocity of each channel."""
    position, velocity = state.unbind(1)
    velocity = damping * velocity - speed * position + torch.tanh(x)
    position = position + velocity
    return position, torch.stack([position, velocity], 1)


class Oscillators(Layer):
    """One oscillator per channel. Its speed and its damping are learned."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.into, self.out = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.speed = nn.Parameter(torch.linspace(-4, 0, dim))
        self.damping = nn.Parameter(torch.full((dim,), 2.0))

    def init_state(self, batch_size, *, device=None, dtype=None):
        return self._zeros(batch_size, 2, self.dim, device=device, dtype=dtype, at_least=torch.float32)

    def run(self, x, state, cu_seqlens):
        state = self._begin(x, state, cu_seqlens)
        operands = self.into(x), self.speed.sigmoid(), self.damping.sigmoid()
        y, last = oscillator(*operands, state, cu_seqlens=cu_seqlens)
        return self.out(y), last


def main() -> None:
    options = parser.parse_args()
    torch.manual_seed(0)
    task = tasks.build("selective_copy", length=64, num_symbols=4)
    pattern = [Oscillators, Oscillators, "window_attention"]
    stack = Stack(64, 3, pattern, layer_options={"window_attention": {"window": 32}})
    model = LanguageModel(task.vocab_size, stack)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(options.steps):
        batch = task.generate(32, seed=step).tensors()
        logits, _ = model(batch.inputs)
        loss = cross_entropy(logits.flatten(0, 1), batch.targets.flatten())  # -100 where nothing is asked
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    print(f"{task}: {score(model, task, 200, seed=[1]):.3f} right, by chance {task.chance:.3f}")


if __name__ == "__main__":
    main()

"""A race draws the tokens that `sample` draws by the same random numbers."""

import pytest
import torch

from scanl.errors import DivergenceError
from scanl.models.decoding.race import Race
from scanl.models.decoding.sampling import Choice


def test_tokens_are_those_of_sample() -> None:
    logits, target = torch.empty(4, 30), torch.zeros(4, dtype=torch.int64)
    drawing, torch_draws = Race(logits, [target]), list[Choice]()
    by_torch = drawing._by_torch
    drawing._by_torch = lambda choice: (torch_draws.append(choice), by_torch(choice))[1]
    for seed in range(300):
        torch.manual_seed(seed)
        logits.normal_().mul_(seed % 20)
        if seed % 3 == 0:
            logits[1, 3:9] = logits[1].max()
        if seed % 4 == 0:
            logits[2, 5:] = -torch.inf
        choices = [
            Choice((0, 1.0, 0.5, 1e-30, 7.0)[seed % 5], generator=torch.Generator().manual_seed(seed)) for _ in range(2)
        ]
        drawing.draw(choices[0], 0)
        assert torch.equal(target, choices[1](logits))
    assert 20 < len(torch_draws) < 100  # where several logits are the largest, and the draw is greedy
    for difference, by_rounding in ((1e-3, 0), (1e-5, 1)):
        torch_draws.clear()
        logits.zero_()[:, 4], logits[2, 3] = 5, 5 - difference
        drawing.draw(Choice(0), 0)
        assert (target.tolist(), len(torch_draws)) == ([4] * 4, by_rounding)


@pytest.mark.parametrize("odd", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite_are_refused(odd: float) -> None:
    logits, target = torch.randn(2, 30), torch.zeros(2, dtype=torch.int64)
    logits[1, 7] = odd
    with pytest.raises(DivergenceError, match=f"the largest logit of the next token is {odd}, expected a finite"):
        Race(logits, [target]).draw(Choice(0.5), 0)
    Race(logits, [target]).draw(Choice(0), 0)
    assert torch.equal(target, logits.argmax(-1))


def test_the_kernel_is_for_plain_draws() -> None:
    logits = torch.zeros(1, 30)
    assert Race.runs(Choice(), logits)
    assert not any(Race.runs(choice, logits) for choice in (Choice(top_k=3), Choice(top_p=0.5)))
    assert not Race.runs(Choice(), logits.double())

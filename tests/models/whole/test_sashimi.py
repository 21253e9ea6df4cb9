"""SaShiMi as a language model generates what it reads."""

import torch

from scanl import models


def test_the_model_generates_what_it_reads():
    torch.manual_seed(0)
    model = models.sashimi(11, 8, pool=(2,), depth=1, state_dim=4).eval()
    made = torch.stack(list(model.generate(torch.tensor([[3]]), max_new_tokens=12, temperature=0)), 1)
    with torch.no_grad():
        logits, _ = model(torch.cat([torch.tensor([[3]]), made], 1))
    assert torch.equal(logits[:, :-1].argmax(-1), made)
    assert model.stack.dim == 8

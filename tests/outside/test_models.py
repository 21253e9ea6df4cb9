"""Whole models against their authors' programs: figures that those gave.

Each ran once in float64, with the weights of `waves`. MEGA is of blocks of transformers 4.57.1, with the embedding, the
last norm and the head in torch, as in the authors' fairseq. HGRN is of the `Hgru1d` of Doraemonzzz/hgru-pytorch, step
by step, with all else of OpenNLPLab/fairseq-evo in torch. Megalodon is the `Mega` of XuezheMax/megalodon, with plain
torch in place of its kernels for GPUs. Vim is of hustvl/Vim, and Caduceus of kuleshov-group/caduceus over the Mamba of
state-spaces/mamba; both without fused norms, and with the plain scan that comes with mamba_ssm.
"""

import json
from pathlib import Path

import pytest
import torch

from scanl import models
from scanl.models.saving import restored
from tests.outside.test_cells import waves

FIGURES = json.loads(Path(__file__).with_name("models.json").read_text())["models"]
STRANDS = [[7, 8, 9, 10, 11, 6, 7, 7, 9, 3], [10, 3, 8, 8, 7, 9, 11, 9, 10, 7]]
READ = {
    "mega": lambda model, _: model((torch.arange(40) * 3 % 7).view(2, 20))[0][1, -1],
    "hgrn": lambda model, _: model((torch.arange(40) * 3 % 7).view(2, 20))[0][1, -1],
    "megalodon": lambda model, _: model((torch.arange(40) * 3 % 7).view(2, 20))[0][1, -1],
    "vim": lambda model, numbers: model(numbers.view(2, 2, 6, 4))[1],
    "caduceus": lambda model, _: model(torch.tensor(STRANDS))[1, 2, 6:12],
}


@pytest.mark.parametrize("case", FIGURES, ids=lambda case: case["model"])
def test_authors_program(case):
    model = getattr(models, case["model"])(**restored(case["options"])).double().eval()
    logits = READ[case["model"]](model, waves(model, 48, 1))
    torch.testing.assert_close(logits, torch.tensor(case["logits"], dtype=torch.float64), rtol=1e-9, atol=1e-12)

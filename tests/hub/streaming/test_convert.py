"""Streams of random modules against the modules: values and gradients. Parts that have no stream, by name."""

import ctypes
import subprocess
import warnings
from itertools import pairwise
from unittest import mock

import pytest
import torch
from torch import nn
from torch._higher_order_ops.scan import scan
from torch.nn import functional as F

from scanl.errors import ConfigError, ShapeError
from scanl.export import write_c
from scanl.hub import convert
from scanl.models.decoding.compiled_step import MIN_TOKENS

COVERS = ["hub/streaming/parts", "hub/streaming/stream", "hub/streaming/survey"]


class CausalConvolution(nn.Module):
    """A convolution over time, padded before the first step: by a pad, or on both sides and then cut."""

    def __init__(self, dim, size, dilation, stride, groups, *, cut):
        super().__init__()
        self.width, self.cut = (size - 1) * dilation, cut
        padding = self.width if cut else 0
        self.conv = nn.Conv1d(dim, dim, size, stride, padding, dilation, groups)

    def forward(self, x):
        steps = x.shape[1] // self.conv.stride[0]
        x = x.transpose(1, 2)
        x = x if self.cut else F.pad(x, (self.width, 0))
        y = self.conv(x)
        return (y[..., :steps] if self.cut else y).transpose(1, 2)


class Recurrent(nn.Module):
    """A recurrence, steps first or batch first, with its sum with the input."""

    def __init__(self, kind, dim, **options):
        super().__init__()
        self.rnn = kind(dim, dim, **options)

    def forward(self, x):
        if self.rnn.batch_first:
            return x + self.rnn(x)[0]
        return x + self.rnn(x.transpose(0, 1))[0].transpose(0, 1)


class Delayed(nn.Module):
    """The input beside that of some steps ago, with a gate."""

    def __init__(self, dim, steps):
        super().__init__()
        self.steps, self.linear = steps, nn.Linear(2 * dim, 2 * dim)

    def forward(self, x):
        before = torch.cat([x.new_zeros(x.shape[0], self.steps, x.shape[2]), x], 1)[:, : -self.steps]
        return F.glu(self.linear(torch.cat([x, before], -1)), -1)


class Chunks(nn.Module):
    """A convolution within each step, whose rows are those of all sequences."""

    def __init__(self, dim):
        super().__init__()
        self.conv = nn.Conv1d(1, 2, 3, padding=1)
        self.linear = nn.Linear(2 * dim, dim)

    def forward(self, x):
        rows = x.reshape(-1, 1, x.shape[-1])
        return x + self.linear(self.conv(rows).flatten(1)).view(*x.shape[:2], -1)


class Channels(nn.Module):
    """What reads channels before steps."""

    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, x):
        return self.part(x.transpose(1, 2)).transpose(1, 2)


def drawn(seed):
    """Return a module of 3 to 5 random parts."""
    numbers = torch.Generator().manual_seed(seed)

    def one(*choices):
        return choices[int(torch.randint(len(choices), (), generator=numbers))]

    def part(dim):
        kinds = {
            "rnn": lambda: Recurrent(
                one(nn.GRU, nn.LSTM, nn.RNN), dim, num_layers=one(1, 2), bias=one(True, False),
                batch_first=one(True, False),
            ),
            "conv": lambda: CausalConvolution(
                dim, one(1, 2, 4), one(1, 3), one(1, 1, 2, 3), one(1, 2), cut=one(True, False)
            ),
            "delay": lambda: one(Delayed(dim, one(1, 3)), Chunks(dim)),
            "norm": lambda: one(nn.LayerNorm(dim), nn.RMSNorm(dim), Channels(nn.BatchNorm1d(dim)), nn.Softmax(-1)),
            "map": lambda: nn.Sequential(
                nn.Linear(dim, dim), one(nn.ReLU(inplace=True), nn.GELU(), nn.Tanh()), nn.Dropout()
            ),
            "pool": lambda: Channels(one(nn.MaxPool1d(2), nn.AvgPool1d(3))),
        }  # fmt: skip
        return kinds[one(*kinds)]()

    dim = one(4, 6)
    first = one(nn.Embedding(7, dim), nn.Linear(dim, dim))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = nn.Sequential(
            first, Recurrent(nn.GRU, dim, batch_first=True), *[part(dim) for _ in range(one(2, 3, 4))]
        )
    for buffers in module.buffers():
        if buffers.is_floating_point():
            buffers.uniform_(0.5, 2.0, generator=numbers)
    return module.double(), numbers


def streamed(stream, x, cuts):
    """Return what a stream gives for pieces between the cuts, one behind the other."""
    ys, state = [], None
    for start, end in pairwise(cuts):
        y, state = stream(x[:, start:end], state)
        ys.append(y)
    return torch.cat(ys, 1)


@pytest.mark.parametrize("seed", range(8))
def test_pieces_give_what_the_whole_gives(seed):
    module, numbers = drawn(seed)
    example = torch.randint(7, (2, 12), generator=numbers)
    if isinstance(module[0], nn.Linear):
        example = torch.randn(2, 12, module[0].in_features, dtype=torch.float64, generator=numbers)
    stream = convert(module, example)
    assert module.training
    steps = 8 * stream.stride
    shape = (3, steps, *example.shape[2:])
    x = torch.randint(7, shape, generator=numbers) if example.ndim == 2 else torch.randn(shape, dtype=torch.float64)
    cuts = [0, *sorted(torch.randint(steps, (4,), generator=numbers).tolist()), steps]
    module.eval()
    wanted, y = module(x), streamed(stream, x, cuts)
    torch.testing.assert_close(y, wanted, rtol=1e-10, atol=1e-10)
    weight = torch.randn(wanted.shape, dtype=torch.float64, generator=numbers)
    parameters = list(module.parameters())
    assert [id(p) for p in stream.parameters()] == [id(p) for p in parameters]
    for one, other in zip(*(torch.autograd.grad((z * weight).sum(), parameters) for z in (wanted, y)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


class Told(nn.Module):
    """A GRU, and a function of it and its input."""

    def __init__(self, function, **options):
        super().__init__()
        self.gru, self.function = nn.GRU(3, 3, batch_first=True, **options), function

    def forward(self, x):
        return self.function(self.gru, x)


PROJECTED = nn.LSTM(3, 3, proj_size=2, batch_first=True)


@pytest.mark.parametrize(("module", "named"), [
    (nn.Sequential(nn.Conv1d(3, 3, 3, padding=1)), r"0 \(Conv1d\) reads 1 steps ahead"),
    (nn.Sequential(nn.Conv1d(3, 3, 5, padding="same")), r"0 \(Conv1d\) reads 2 steps ahead"),
    (nn.LSTM(3, 4, bidirectional=True), "LSTM reads later steps"),
    (Told(lambda gru, x: PROJECTED(gru(x)[0], (torch.ones(1, len(x), 2), x.new_zeros(1, len(x), 3)))[0]),
     "begins with a projected state"),
    (nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), r"self_attn \(MultiheadAttention\) mixes steps"),
    (Told(lambda gru, x: gru(x, gru(x)[1])[0]), r"gru \(GRU\) begins with the end of another part"),
    (Told(lambda gru, x: gru(x)[0] + x.mean(1, keepdim=True)), "add uses the end of the sequence"),
    (Told(lambda gru, x: gru(x)[0].flip(1)), "flip mixes steps"),
    (Told(lambda gru, x: gru(x)[0].softmax(1)), "softmax mixes steps"),
    (Told(lambda gru, x: gru(x)[0][:, :5]), "gives pieces another result"),
    (Told(lambda gru, x: gru(x)[0].reshape(-1, 3)), "the result has the steps of all sequences in one axis"),
    (Told(lambda gru, x: gru(x)[0].flatten(0, 1).cumsum(0)), "cumsum mixes steps"),
    (Told(lambda gru, x: gru(x)[0].flatten(1)), "flatten moves entries"),
])  # fmt: skip
def test_a_part_without_a_stream_is_named(module, named):
    with pytest.raises(ConfigError, match=named) as error:
        convert(module, torch.randn(2, 12, 4) if isinstance(module, nn.TransformerEncoderLayer) else None)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("function", [
    lambda gru, x: gru(x)[0][:, -1],
    lambda gru, x: gru(x)[0].mean(1),
    lambda gru, x: gru(x)[1],
    lambda gru, x: gru(x[:, :-2])[1],
    lambda gru, x: PROJECTED(gru(x)[0])[1][0],
])  # fmt: skip
def test_the_end_so_far_is_a_result(function):
    module = Told(function)
    stream = convert(module, time=1)
    x, state = torch.randn(2, 9, 3), None
    for start, end in pairwise([0, 4, 4, 9]):
        y, state = stream(x[:, start:end], state)
        torch.testing.assert_close(y, module(x[:, :end]))


def test_programs_and_c(tmp_path):
    module = nn.Sequential(
        CausalConvolution(4, 3, 1, 2, 2, cut=True), Recurrent(nn.LSTM, 4, batch_first=True), nn.Linear(4, 2)
    ).eval()
    x = torch.randn(1, 12, 4)
    wanted = module(x)
    path = tmp_path / "module.pt2"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(torch.export.export(module, (x,), strict=False), path)
    stream = convert(path)
    assert (stream.time, stream.stride) == (1, 2)
    torch.testing.assert_close(streamed(stream, x, [0, 3, 12]), wanted)
    write_c(stream, tmp_path / "cell.c")
    library = tmp_path / "cell.so"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, tmp_path / "cell.c", "-lm"], check=True)
    cell, state, y = ctypes.CDLL(str(library)), ctypes.create_string_buffer(4096), (ctypes.c_float * 2)()
    cell.cell_start(state)
    for at in range(6):
        piece = x[0, 2 * at : 2 * at + 2].contiguous()
        cell.cell_step(ctypes.c_void_p(piece.data_ptr()), state, y)
        torch.testing.assert_close(torch.tensor(list(y)), wanted[0, at].detach())


def test_many_pieces_become_one_kernel():
    """And what changes afterwards is noticed: weights in place, another batch, gradients."""
    module = nn.Sequential(CausalConvolution(4, 3, 1, 2, 1, cut=False), Recurrent(nn.GRU, 4, batch_first=True)).eval()
    stream = convert(module)
    x = torch.randn(2, 2 * MIN_TOKENS + 8, 4)
    cuts = range(0, x.shape[1] + 1, 2)
    with torch.no_grad():
        torch.testing.assert_close(streamed(stream, x, cuts), module(x))
        module[1].rnn.weight_hh_l0.mul_(-1)
        with mock.patch.object(stream._compiled, "_step", side_effect=AssertionError):
            torch.testing.assert_close(streamed(stream, x[:, :12], cuts[:7]), module(x[:, :12]))
        torch.testing.assert_close(streamed(stream, x[:1, :12], cuts[:7]), module(x[:1, :12]))
    stream(x[:, :2])[0].sum().backward()
    assert module[0].conv.weight.grad.any()


class Frames(nn.Module):
    """Convolutions and poolings within each step, then a recurrence, of which the last step is the result."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 4, 3, padding=1)
        self.up = nn.ConvTranspose1d(4, 4, 3, 2, 1, 1, groups=2)
        self.lstm = nn.LSTM(16, 5, batch_first=True)

    def forward(self, x):
        frames = self.up(F.max_pool1d(self.conv(x.reshape(-1, 1, 4)), 2))
        frames = F.avg_pool1d(frames, 3, 1, 1).flatten(1)
        return self.lstm(frames.unflatten(0, x.shape[:2]))[0][:, -1]


def test_the_end_of_frames_is_one_kernel():
    module, x, state = Frames().eval(), torch.randn(2, 9, 4), None
    stream = convert(module, x)
    with torch.no_grad():
        for start, end in pairwise([0, 4, 4, 8]):
            y, state = stream(x[:, start:end], state)
            torch.testing.assert_close(y, module(x[:, :end]))
        stream._compiled.compile(2)
        with mock.patch.object(stream._compiled, "_step", side_effect=AssertionError):
            torch.testing.assert_close(stream(x[:, 8:], state)[0], module(x))


class OwnLoop(nn.Module):
    """A cell in torch's own scan."""

    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.LSTMCell(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        zeros = x.new_zeros(x.shape[0], 4)

        def step(state, x_t):
            h, c = self.cell(x_t, state)
            return (h, c), h.clone()

        return self.out(scan(step, (zeros, zeros.clone()), x.transpose(0, 1).contiguous())[1].transpose(0, 1))


def test_a_loop_over_a_cell_is_one_kernel(tmp_path):
    module, x, state = OwnLoop().eval(), torch.randn(2, 9, 3), None
    stream = convert(module, x)
    with torch.no_grad():
        h, c, wanted = torch.zeros(2, 4), torch.zeros(2, 4), []
        for step in x.unbind(1):
            h, c = module.cell(step, (h, c))
            wanted.append(module.out(h))
        wanted = torch.stack(wanted, 1)
        first, state = stream(x[:, :6])
        none, state = stream(x[:, 6:6], state)
        rest, state = stream(x[:, 6:8], state)
        torch.testing.assert_close(torch.cat([first, none, rest], 1), wanted[:, :8])
        stream._compiled.compile(2)
        with mock.patch.object(stream._compiled, "_step", side_effect=AssertionError):
            torch.testing.assert_close(stream(x[:, 8:], state)[0], wanted[:, 8:])
    write_c(stream, tmp_path / "cell.c")


def test_bad_arguments():
    with pytest.raises(ConfigError, match=r"module is a str?|module is nothing\.pt2"):
        convert("nothing.pt2")
    with pytest.raises(ConfigError, match="module is a int"):
        convert(3)
    with pytest.raises(ConfigError, match="example is None for a ReLU"):
        convert(nn.ReLU())
    with pytest.raises(ConfigError, match=r"example is \(2, 1\)"):
        convert(nn.GRU(1, 1), torch.zeros(2, 1))
    with pytest.raises(ShapeError, match=r"x has shape \(2, 5, 4\), expected \(B, T, 3\)"):
        convert(nn.GRU(3, 3, batch_first=True))(torch.zeros(2, 5, 4))

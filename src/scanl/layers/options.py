"""The options that layers share: one name, one meaning, one range.

A layer annotates an argument of its constructor with a type from here. Where its option differs in a detail, it says so
beside the type: `width: Annotated[Width, "channels of the recurrence; by default 4/3 D"]`. An option of one layer alone
is annotated in place: `tau: Annotated[float, above(0), "temperature of the decay"]`.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from scanl.layers.parts.hippo import STARTS as DIAGONAL_STARTS
from scanl.ops.ssm_kernels import DISCRETIZATIONS
from scanl.options import Range, above, at_least, at_least_option, between, divides, multiple_of, one_of


def _fills_heads(expand: float, options: Mapping[str, Any]) -> bool:
    channels = expand * options["dim"]
    width = round(channels)
    return width >= 1 and abs(width - channels) <= 1e-5 * width and width % options["num_heads"] == 0


in_heads = Range("dim={dim} times it to be a multiple of num_heads={num_heads}", _fills_heads, relation=True)


def _heads(options: Mapping[str, Any]) -> int:
    return options["expand"] * options["dim"] // options["head_dim"]


fits_expanded = Range(
    "a divisor of expand * dim, with expand={expand} and dim={dim}",
    lambda head_dim, options: options["expand"] * options["dim"] % head_dim == 0,
    relation=True,
)
fits_heads = Range(
    "a divisor of expand * dim / head_dim, with expand={expand}, dim={dim} and head_dim={head_dim}",
    lambda num_groups, options: _heads(options) % num_groups == 0,
    relation=True,
)

# sizes
Dim = Annotated[int, at_least(1), "D, model width"]
Heads = Annotated[int, divides("dim"), "H, number of heads; a divisor of dim"]
FreeHeads = Annotated[int, at_least(1), "H, number of heads"]
KeyValueHeads = Annotated[int, divides("num_heads"), "heads of keys and values, each for several of queries"]
Groups = Annotated[int, at_least(1), "groups of heads or channels that share parameters"]
ExpandedHeadDim = Annotated[int, at_least(1), fits_expanded, "P, channels of a head; a divisor of expand * dim"]
ExpandedGroups = Annotated[
    int, at_least(1), fits_heads, "G, groups of heads; the heads of a group use the same B and C"
]
HeadDim = Annotated[int, at_least(1), "channels of a head"]
KeyDim = Annotated[int, at_least(1), "channels of queries and keys"]
EvenStateDim = Annotated[int, multiple_of(2), "N, real numbers in the state of each channel, even"]
StateDim = Annotated[int, at_least(1), "N, numbers in the state, or in the state of each channel"]
Slots = Annotated[int, at_least(1), "M, slots of a head's memory"]
Width = Annotated[int, at_least(1), "channels of the recurrence"]
HiddenDim = Annotated[int, at_least(1), "channels between two maps"]
Depth = Annotated[int, at_least(1), "layers inside"]
Rank = Annotated[int, at_least(1), "rank of a product of two matrices"]
MultipleOf = Annotated[int, at_least(1), "what a number of channels is rounded up to a multiple of"]
Expand = Annotated[float, above(0), "channels inside as a multiple of dim"]
ExpandKeys = Annotated[float, above(0), in_heads, "all heads together have expand_k * dim channels of keys"]
ExpandValues = Annotated[float, above(0), in_heads, "all heads together have expand_v * dim channels of values"]
MaxLength = Annotated[int, at_least(1), "steps that the layer can see"]
Window = Annotated[int, at_least(1), "steps that the layer sees at once"]
ChunkSize = Annotated[int, at_least(1), "steps that are computed together"]

# parts
ConvSize = Annotated[int, at_least(1), "W, window of the causal convolution"]
ConvSizeOrNone = Annotated[int | None, at_least(1), "W, window of the causal convolution; None for no convolution"]
ConvBias = Annotated[bool, "a bias in the convolution"]
Bias = Annotated[bool, "biases in the linear maps"]
OutputNorm = Annotated[bool, "a norm of the output"]
OutputGate = Annotated[bool, "a gate on the output"]
NegativeEigenvalues = Annotated[bool, "write strengths up to 2 instead of 1"]
NormEps = Annotated[float, above(0), "ε in the norm"]
Eps = Annotated[float, above(0), "ε in a denominator"]
Activation = Annotated[str, "the nonlinear function"]
RopeBase = Annotated[float, above(0), "base of the rotary positions' wavelengths"]
RopeFraction = Annotated[float, between(0, 1), "share of a head's channels that turn with the position"]
Dropout = Annotated[float, between(0, 1), "probability with which a value is dropped in training"]
Variant = Annotated[str, "which of the published forms"]
Causal = Annotated[bool, "if False, every step reads all steps, including future ones"]

# dynamics
TimeStep = Annotated[float, above(0), "Δt, the duration of a step"]
StepMin = Annotated[float, above(0), "lower end of the range of the initial step Δ"]
StepMax = Annotated[float, at_least_option("dt_min"), "upper end of the range of the initial step Δ"]
StepFloor = Annotated[float, above(0), "least initial step Δ"]
Substeps = Annotated[int, at_least(1), "steps of the solver within one step of the sequence"]
Discretization = Annotated[str, one_of(DISCRETIZATIONS), "how the system is discretized"]
Method = Annotated[str, "method of the solver of the differential equation"]

RelativeTolerance = Annotated[float, above(0), "relative error of a solution at most"]
MaxIterations = Annotated[int, at_least(1), "iterations of the solver at most"]

# start and training
Trained = Annotated[bool, "constants of the dynamics are trained"]
Init = Annotated[str, "the initial values"]
DiagonalInit = Annotated[
    str, one_of(DIAGONAL_STARTS), 'imaginary parts of A: "lin", "inv", "legs"; or "real", A = -1, -2, ...'
]
InitStd = Annotated[float, at_least(0), "standard deviation of the initial weights"]
LearningRate = Annotated[float | None, "learning rate of the system's own parameters; None for the optimizer's"]
Seed = Annotated[int, "seed of the fixed random choices"]

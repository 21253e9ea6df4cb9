"""Public ops, their states and their errors. Feature maps for linear attention are in `feature_maps`."""

from scanl.ops import feature_maps as feature_maps
from scanl.ops._frame.context import backend, op_calls
from scanl.ops.associative_scan import associative_scan
from scanl.ops.cell import Cell, cell
from scanl.ops.delta_rule import delta_rule
from scanl.ops.dplr_scan import dplr_scan
from scanl.ops.elman import elman
from scanl.ops.exact import exact
from scanl.ops.fixed_point import Convergence, ConvergenceError, FixedPoint, fixed_point
from scanl.ops.gru import gru
from scanl.ops.indrnn import indrnn
from scanl.ops.ligru import ligru
from scanl.ops.linear_attention import linear_attention, noncausal_linear_attention, normalized_linear_attention
from scanl.ops.linear_scan import linear_scan
from scanl.ops.long_convolution import LongConvolutionState, long_convolution
from scanl.ops.lstm import lstm
from scanl.ops.nonlinear_scan import nonlinear_scan
from scanl.ops.segment_attention import SegmentMemory, init_memory, segment_attention
from scanl.ops.selective_scan import selective_scan
from scanl.ops.short_convolution import short_convolution
from scanl.ops.slstm import slstm
from scanl.ops.sru import sru
from scanl.ops.ssm_kernels import discretize, discretize_dplr, ssm_kernel_diagonal, ssm_kernel_dplr, sum_of_powers
from scanl.ops.weighted_average import noncausal_weighted_average, weighted_average

__all__ = [
    "Cell",
    "Convergence",
    "ConvergenceError",
    "FixedPoint",
    "LongConvolutionState",
    "SegmentMemory",
    "associative_scan",
    "backend",
    "cell",
    "delta_rule",
    "discretize",
    "discretize_dplr",
    "dplr_scan",
    "elman",
    "exact",
    "fixed_point",
    "gru",
    "indrnn",
    "init_memory",
    "ligru",
    "linear_attention",
    "linear_scan",
    "long_convolution",
    "lstm",
    "noncausal_linear_attention",
    "noncausal_weighted_average",
    "nonlinear_scan",
    "normalized_linear_attention",
    "op_calls",
    "segment_attention",
    "selective_scan",
    "short_convolution",
    "slstm",
    "sru",
    "ssm_kernel_diagonal",
    "ssm_kernel_dplr",
    "sum_of_powers",
    "weighted_average",
]


def __dir__() -> list[str]:
    return list(__all__)

from scanl.ops.linear_attention import linear_attention as linear_attention
from scanl.ops.linear_attention import noncausal_linear_attention as noncausal_linear_attention
from scanl.ops.linear_attention import normalized_linear_attention as normalized_linear_attention
from scanl.ops.linear_scan import linear_scan as linear_scan
from scanl.ops.delta_rule import delta_rule as delta_rule
from scanl.ops.dplr_scan import dplr_scan as dplr_scan

"""The functions and modules of mamba-ssm, computed by scanl's ops.

Source: Gu and Dao, https://github.com/state-spaces/mamba, version 2.3.2.
"""

from scanl.compat.causal_conv1d import causal_conv1d_fn as causal_conv1d_fn
from scanl.compat.causal_conv1d import causal_conv1d_update as causal_conv1d_update
from scanl.compat.mamba_ssm.mamba import Mamba as Mamba
from scanl.compat.mamba_ssm.mamba import mamba_inner_fn as mamba_inner_fn
from scanl.compat.mamba_ssm.mamba2 import Mamba2 as Mamba2
from scanl.compat.mamba_ssm.scans import mamba_chunk_scan_combined as mamba_chunk_scan_combined
from scanl.compat.mamba_ssm.scans import selective_scan_fn as selective_scan_fn
from scanl.compat.mamba_ssm.scans import selective_scan_ref as selective_scan_ref
from scanl.compat.mamba_ssm.scans import selective_state_update as selective_state_update

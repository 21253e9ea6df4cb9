from scanl.layers.attention.attention import Attention as Attention
from scanl.layers.attention.diag_attention import DiagAttention as DiagAttention
from scanl.layers.attention.diag_attention import DiagAttentionT2 as DiagAttentionT2
from scanl.layers.attention.forgetting_attention import ForgettingAttention as ForgettingAttention
from scanl.layers.attention.multi_state_attention import MultiStateAttention as MultiStateAttention
from scanl.layers.attention.path_attention import PaTHAttention as PaTHAttention
from scanl.layers.attention.transformer_xl import TransformerXL as TransformerXL
from scanl.layers.attention.window_attention import WindowAttention as WindowAttention

"""The functions `chunk_*` and `fused_recurrent_*` of flash-linear-attention over scanl's ops.

Each has the signature of version 0.6, and its axes: inputs (B, T, H, ·), states (N, H, K, V), or (N, H, V, K) with
`state_v_first`. The two forms of one recurrence, in chunks and step by step, call the same op, which chooses how it
computes by device and size. Dtypes that the original refuses are possible: `chunk_delta_rule` takes float32.

Every function returns (o, state), and None for the state unless output_final_state. `scale=None` is 1/sqrt(K).
`cu_seqlens` has the offsets of packed sequences, (N+1,), over B = 1. `use_qk_l2norm_in_kernel`: q and k are divided by
sqrt(‖·‖² + 1e-6). Arguments for kernels are ignored (`scanl.compat.calls.KERNEL`); those that would change what is
computed, and that no op computes, are refused (`REFUSED_ARGUMENTS`).

Source: Yang and Zhang, https://github.com/fla-org/flash-linear-attention, version 0.6.
"""

from scanl.compat import recurrences
from scanl.compat.calls import written_as
from scanl.ops import delta_rule, dplr_scan, linear_attention, linear_scan

# fmt: off


@written_as(linear_attention, recurrences.gla)
def chunk_gla(
    q, k, v, g, scale=None, initial_state=None, output_final_state=False, state_v_first=False, cu_seqlens=None,
    cu_seqlens_cpu=None
): ...


@written_as(linear_attention, recurrences.gla)
def fused_recurrent_gla(
    q, k, v, gk=None, gv=None, scale=None, initial_state=None, output_final_state=False, reverse=False,
    state_v_first=False, cu_seqlens=None, **kwargs
): ...


@written_as(linear_attention, recurrences.simple_gla)
def chunk_simple_gla(
    q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, output_final_state=False, state_v_first=False,
    cu_seqlens=None, cu_seqlens_cpu=None, **kwargs
): ...


@written_as(linear_attention, recurrences.simple_gla)
def fused_chunk_simple_gla(
    q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None
): ...


@written_as(linear_attention, recurrences.simple_gla)
def fused_recurrent_simple_gla(
    q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, output_final_state=False, reverse=False,
    state_v_first=False, cu_seqlens=None, **kwargs
): ...


@written_as(linear_attention, recurrences.parallel_simple_gla)
def parallel_simple_gla(q, k, v, g=None, scale=None, output_attentions=False, cu_seqlens=None, cu_seqlens_cpu=None): ...


@written_as(linear_attention, recurrences.retention)
def chunk_retention(q, k, v, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, **kwargs): ...


@written_as(linear_attention, recurrences.retention)
def fused_chunk_retention(q, k, v, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None): ...


@written_as(linear_attention, recurrences.retention)
def fused_recurrent_retention(
    q, k, v, scale=None, initial_state=None, output_final_state=False, reverse=False, state_v_first=False,
    cu_seqlens=None, **kwargs
): ...


@written_as(linear_attention, recurrences.parallel_retention)
def parallel_retention(q, k, v, scale=None, output_attentions=False, cu_seqlens=None): ...


@written_as(linear_attention, recurrences.linear_attn)
def chunk_linear_attn(
    q, k, v, scale=None, initial_state=None, output_final_state=False, normalize=True, cu_seqlens=None
): ...


@written_as(linear_attention, recurrences.linear_attn)
def fused_chunk_linear_attn(
    q, k, v, scale=None, initial_state=None, output_final_state=False, normalize=True, cu_seqlens=None
): ...


@written_as(linear_attention, recurrences.linear_attn)
def fused_recurrent_linear_attn(
    q, k, v, scale=None, initial_state=None, output_final_state=False, reverse=False, normalize=False, cu_seqlens=None
): ...


@written_as(linear_attention, recurrences.lightning_attn)
def chunk_lightning_attn(
    q, k, v, layer_idx, num_layers, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None,
    **kwargs
): ...


@written_as(linear_attention, recurrences.lightning_attn)
def fused_recurrent_lightning_attn(
    q, k, v, layer_idx, num_layers, scale=None, initial_state=None, output_final_state=False, reverse=False,
    cu_seqlens=None
): ...


@written_as(linear_attention, recurrences.rwkv6)
def chunk_rwkv6(
    r, k, v, w, u, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, cu_seqlens_cpu=None,
    **kwargs
): ...


@written_as(linear_attention, recurrences.rwkv6)
def fused_recurrent_rwkv6(
    r, k, v, w, u, scale=None, initial_state=None, output_final_state=False, reverse=False, cu_seqlens=None
): ...


@written_as(linear_attention, recurrences.gsa)
def chunk_gsa(
    q, k, v, s, g=None, scale=None, initial_state=None, output_final_state=False, checkpoint_level=2, cu_seqlens=None,
    cu_seqlens_cpu=None, **kwargs
): ...


@written_as(linear_attention, recurrences.gsa)
def fused_recurrent_gsa(
    q, k, v, s, g=None, scale=None, initial_state=None, output_final_state=False, reverse=False, cu_seqlens=None
): ...


@written_as(delta_rule, recurrences.delta)
def chunk_delta_rule(
    q, k, v, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    cu_seqlens=None, cu_seqlens_cpu=None, **kwargs
): ...


@written_as(delta_rule, recurrences.delta)
def fused_recurrent_delta_rule(
    q, k, v, beta=None, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    cu_seqlens=None
): ...


@written_as(delta_rule, recurrences.gated_delta_rule)
def chunk_gated_delta_rule(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, cu_seqlens=None,
    cu_seqlens_cpu=None, chunk_indices=None, cp_context=None, **kwargs
): ...


@written_as(delta_rule, recurrences.gated_delta_rule)
def fused_recurrent_gated_delta_rule(
    q, k, v, g=None, gk=None, gv=None, beta=None, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, A_log=None, dt_bias=None,
    use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, cu_seqlens=None, **kwargs
): ...


@written_as(delta_rule, recurrences.kda)
def chunk_kda(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, safe_gate=False,
    lower_bound=None, disable_recompute=False, return_intermediate_states=False, state_v_first=False, cu_seqlens=None,
    cu_seqlens_cpu=None, cp_context=None, use_graph=False, max_num_seqs=None, **kwargs
): ...


@written_as(delta_rule, recurrences.kda)
def fused_recurrent_kda(
    q, k, v, g, beta, A_log=None, dt_bias=None, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
    lower_bound=None, state_v_first=False, cu_seqlens=None, **kwargs
): ...


@written_as(delta_rule, recurrences.gated_delta_product)
def chunk_gated_delta_product(
    q, k, v, g, beta, num_householder, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, cu_seqlens=None, cu_seqlens_cpu=None, cp_context=None
): ...


@written_as(dplr_scan, recurrences.comba)
def chunk_comba(
    q, k, v, p, g, beta=None, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    cu_seqlens=None, cu_seqlens_cpu=None
): ...


@written_as(dplr_scan, recurrences.comba)
def fused_recurrent_comba(
    q, k, p, v, g, beta=None, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    cu_seqlens=None
): ...


@written_as(dplr_scan, recurrences.dplr)
def chunk_dplr_delta_rule(
    q, k, v, a, b, gk, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, cu_seqlens_cpu=None,
    safe_gate=False, chunk_size=None, disable_recompute=False, cp_context=None, lower_bound=None, **kwargs
): ...


@written_as(dplr_scan, recurrences.dplr)
def fused_recurrent_dplr_delta_rule(
    q, k, v, a, b, gk, scale=None, initial_state=None, output_final_state=False, reverse=False, cu_seqlens=None
): ...


@written_as(dplr_scan, recurrences.dplr)
def chunk_iplr_delta_rule(
    q, k, v, a, b, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, cu_seqlens_cpu=None,
    **kwargs
): ...


@written_as(dplr_scan, recurrences.dplr)
def fused_recurrent_iplr_delta_rule(
    q, k, v, a, b, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None
): ...


@written_as(dplr_scan, recurrences.rwkv7)
def chunk_rwkv7(
    r, w, k, v, a, b, scale=1.0, initial_state=None, output_final_state=False, cu_seqlens=None, cu_seqlens_cpu=None,
    safe_gate=False, chunk_size=None, disable_recompute=False, cp_context=None, lower_bound=None
): ...


@written_as(dplr_scan, recurrences.rwkv7)
def fused_recurrent_rwkv7(
    r, w, k, v, a, b, scale=None, initial_state=None, output_final_state=True, cu_seqlens=None
): ...


@written_as(dplr_scan, recurrences.mul_rwkv7)
def fused_mul_recurrent_rwkv7(
    r, w, k, v, kk, a, scale=1.0, initial_state=None, output_final_state=False, reverse=False, cu_seqlens=None
): ...


@written_as(linear_scan, recurrences.hgrn)
def chunk_hgrn(x, g, initial_state=None, output_final_state=False): ...


@written_as(linear_scan, recurrences.hgrn)
def fused_recurrent_hgrn(x, g, initial_state=None, output_final_state=False, cu_seqlens=None): ...


chunk_gdn, fused_recurrent_gdn = chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

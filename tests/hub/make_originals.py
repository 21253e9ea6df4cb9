"""Make the checkpoints of tests/hub/originals and their logits anew, by the programs of the models' authors.

    python tests/hub/make_originals.py MAMBA RWKV_LM

MAMBA and RWKV_LM are clones of state-spaces/mamba and BlinkDL/RWKV-LM; beside them it needs PyPI's rwkv, xlstm,
mlstm_kernels, flash-linear-attention and einops. The files there were made with mamba at e9594ce, RWKV-LM at 524481d,
rwkv 0.8.32, xlstm 2.0.6, mlstm_kernels 2.0.6 and flash-linear-attention 0.6.0.

Each model is a class of its authors, and so is the file that is written. Where their module calls a kernel for GPUs,
it gets their own reference in torch; norms, convolutions and SwiGLU of flash-linear-attention are those of torch.
RWKV-LM trains, and PyPI's rwkv, of the same author, gives the logits. Weights are random, so that none can be left out,
and numbers of bfloat16, so that the files are small.
"""

import argparse
import importlib.util
import json
import os
import shutil
import sys
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

OUT = Path(__file__).with_name("originals")
VOCAB = 11
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 10, 0]


def shaken(model: nn.Module) -> nn.Module:
    """Add noise to all weights, and round them to bfloat16."""
    for name, weight in model.named_parameters():
        if name.endswith("igate_preact.bias"):
            weight.zero_()  # it starts so low that nothing enters the memory
        weight.copy_((weight + 0.3 * torch.randn(weight.shape)).bfloat16())
    return model.eval()


def folder(name: str) -> Path:
    path = OUT / name
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def module_of(path: Path, name: str) -> ModuleType:
    """Import one file without its assertions, which are about sizes for a GPU."""
    module = ModuleType(name)
    sys.modules[name] = module
    exec(compile(path.read_text(), str(path), "exec", optimize=1), vars(module))
    return module


def mamba(repository: Path) -> dict[str, list[list[float]]]:
    sys.path.insert(0, str(repository))
    sys.modules |= {"selective_scan_cuda": MagicMock(), "mamba_ssm.modules.mamba3": MagicMock()}
    from mamba_ssm.models import mixer_seq_simple
    from mamba_ssm.models.config_mamba import MambaConfig
    from mamba_ssm.modules import mamba2, mamba_simple
    from mamba_ssm.ops import selective_scan_interface
    from mamba_ssm.ops.triton import layer_norm, layernorm_gated, ssd_combined

    def norm(self, x, *_):
        return layer_norm.rms_norm_ref(x, self.weight, self.bias, eps=self.eps)

    def gated_norm(self, x, z):
        options = {"eps": self.eps, "group_size": self.group_size, "norm_before_gate": self.norm_before_gate}
        return layernorm_gated.rms_norm_ref(x, self.weight, self.bias, z, **options)

    def scan(*arguments, chunk_size, seq_idx, cu_seqlens, return_final_states, return_varlen_states, **options):
        return ssd_combined.ssd_selective_scan(*arguments, **options)

    layer_norm.RMSNorm.forward = norm
    layernorm_gated.RMSNorm.forward = gated_norm
    for module in (mamba_simple, selective_scan_interface):
        module.selective_scan_fn = selective_scan_interface.selective_scan_ref
    mamba2.mamba_chunk_scan_combined = scan
    shared = {"d_model": 8, "n_layer": 2, "vocab_size": VOCAB, "fused_add_norm": False}
    configs = {
        "mamba": MambaConfig(**shared, ssm_cfg={"d_state": 4}),
        "mamba_layernorm": MambaConfig(
            **shared, rms_norm=False, residual_in_fp32=False, tie_embeddings=False, ssm_cfg={"layer": "Mamba1"}
        ),
        "mamba2": MambaConfig(
            **shared, ssm_cfg={"layer": "Mamba2", "d_state": 6, "headdim": 4, "ngroups": 2, "use_mem_eff_path": False}
        ),
    }
    logits = {}
    for name, config in configs.items():
        model = shaken(mixer_seq_simple.MambaLMHeadModel(config))
        logits[name] = model(torch.tensor([TOKENS])).logits[0].tolist()
        model.bfloat16().save_pretrained(folder(name))
    return logits


def rwkv(repository: Path) -> dict[str, list[list[float]]]:
    import torch.utils.cpp_extension

    torch.utils.cpp_extension.load = MagicMock()  # kernels for GPUs
    os.environ |= {"RWKV_JIT_ON": "0", "RWKV_T_MAX": "64", "RWKV_FLOAT_MODE": "fp32", "RWKV_HEAD_SIZE_A": "4"}
    os.environ |= {"RWKV_TRAIN_TYPE": "", "RWKV_CTXLEN": "64", "RWKV_CUDA_ON": "0"}
    args = {"vocab_size": VOCAB, "n_embd": 8, "n_layer": 2, "dim_att": 8, "dim_ffn": 12, "ctx_len": 64}
    args |= {"head_size_a": 4, "head_size_divisor": 8, "head_qk": 0, "dropout": 0, "tiny_att_dim": -1}
    args |= {"tiny_att_layer": -1, "my_pos_emb": 0, "pre_ffn": 0, "my_testing": ""}
    logits = {}
    for version, kind in ((4, ""), (5, "x052"), (6, "x060"), (7, "x070")):
        os.environ["RWKV_MY_TESTING"] = kind
        source = repository / ("RWKV-v4neo" if version == 4 else "RWKV-v5") / "src" / "model.py"
        model = shaken(module_of(source, f"rwkv_lm_{version}").RWKV(SimpleNamespace(**args)))
        path = folder(f"rwkv{version}") / "rwkv.pth"
        torch.save(model.state_dict(), path)  # in float32, because the program norms the embedding in its dtype
        os.environ["RWKV_V7_ON"] = os.environ["RWKV_JIT_ON"] = str(int(version == 7))
        spec = importlib.util.find_spec("rwkv.model")
        program = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(program)
        os.environ["RWKV_JIT_ON"] = "0"
        model = program.RWKV(model=str(path.with_suffix("")), strategy="cpu fp32")
        logits[f"rwkv{version}"] = model.forward(TOKENS, None, full_output=True)[0].tolist()
        weights = torch.load(path, weights_only=True)
        torch.save({name: weight.bfloat16() for name, weight in weights.items()}, path)
    return logits


def xlstm() -> dict[str, list[list[float]]]:
    from dataclasses import asdict

    import yaml
    from xlstm.xlstm_large import xLSTMLarge, xLSTMLargeConfig

    config = xLSTMLargeConfig(
        embedding_dim=16,
        num_heads=2,
        num_blocks=2,
        vocab_size=VOCAB,
        ffn_round_up_to_multiple_of=8,
        mode="inference",
        chunkwise_kernel="chunkwise--native_autograd",
        sequence_kernel="native_sequence__native",
        step_kernel="native",
        autocast_kernel_dtype="float32",
    )
    model = shaken(xLSTMLarge(config))
    path = folder("xlstm")
    logits = model(torch.tensor([TOKENS]))[0].tolist()
    options = {name: value for name, value in asdict(config).items() if name != "backend"}
    (path / "config.yaml").write_text(yaml.safe_dump(options))
    save_file(model.bfloat16().state_dict(), path / "model.safetensors")
    return {"xlstm": logits}


def fla() -> dict[str, list[list[float]]]:
    import fla.layers.delta_net
    import fla.layers.gated_deltanet
    import fla.layers.gla
    import fla.layers.hgrn2
    import fla.layers.mamba
    import fla.layers.rwkv6
    import fla.layers.rwkv7
    import fla.models as models
    import fla.models.rwkv6.modeling_rwkv6 as modeling_rwkv6
    import fla.models.rwkv7.modeling_rwkv7 as modeling_rwkv7
    import fla.modules.mlp
    from fla.modules import FusedRMSNormGated, GroupNorm, LayerNorm, RMSNorm, ShortConvolution
    from fla.modules.token_shift import token_shift_ref
    from fla.ops.delta_rule.naive import delta_rule_recurrence
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
    from fla.ops.generalized_delta_rule.dplr.naive import dplr_recurrence
    from fla.ops.gla.naive import naive_recurrent_gla
    from fla.ops.rwkv6.recurrent_naive import naive_recurrent_rwkv6
    from fla.ops.rwkv7.fused_addcmul import torch_addcmul_rwkv7
    from fla.ops.rwkv7.fused_k_update import k_update_ref
    from fla.ops.rwkv7.gate_output_correction import gate_output_correction_ref

    def unit(x):
        return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()

    def convolved(x, weight, bias, activation):
        y = F.conv1d(F.pad(x.mT, (weight.shape[-1] - 1, 0)), weight.view(len(weight), 1, -1), bias, groups=len(weight))
        return F.silu(y.mT) if activation == "silu" else y.mT

    def norm(self, x, residual=None, prenorm=False):
        x = x if residual is None else x + residual
        if isinstance(self, LayerNorm):
            y = F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        else:
            y = F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return (y, x) if prenorm else y

    def group_norm(self, x):
        return F.group_norm(x.flatten(0, 1), self.num_groups, self.weight, self.bias, self.eps).view_as(x)

    def delta_rule(q, k, v, beta, **_):
        o, _ = delta_rule_recurrence(*(each.transpose(1, 2) for each in (unit(q), unit(k), v, beta)))
        return o.transpose(1, 2), None

    def gated_delta_rule(q, k, v, g, beta, A_log, dt_bias, allow_neg_eigval=False, **_):
        g, beta = -A_log.exp() * F.softplus(g + dt_bias), beta.sigmoid() * (2 if allow_neg_eigval else 1)
        q, k = (unit(each).repeat_interleave(v.shape[2] // each.shape[2], 2) for each in (q, k))
        return naive_recurrent_gated_delta_rule(q, k, v, beta, g)[0], None

    def gla(q, k, v, g=None, gk=None, **_):
        return naive_recurrent_gla(q, k, v, gk if g is None else g)[0], None

    def rwkv7(r, w, k, v, kk, a, **_):
        q, reads, writes = r * r.shape[-1] ** 0.5, -kk, kk * a
        o, _ = dplr_recurrence(*(each.transpose(1, 2) for each in (q, k, v, reads, writes, w)))
        return o.transpose(1, 2), None

    def rwkv6(r, k, v, w, u, **_):
        operands = (each.transpose(1, 2) for each in (r, k, v, w))
        return naive_recurrent_rwkv6(*operands, u, scale=1.0)[0].transpose(1, 2), None

    def shift(x, *_, output_cache=False, **__):
        delta = token_shift_ref(x)
        return (delta, None) if output_cache else delta

    for kind in (RMSNorm, LayerNorm):
        kind.forward = norm
    GroupNorm.forward = group_norm
    FusedRMSNormGated.forward = lambda self, x, gate: norm(self, x) * F.silu(gate)
    ShortConvolution.forward = lambda self, x, **_: (convolved(x, self.weight, self.bias, self.activation), None)
    fla.modules.mlp.swiglu_linear = lambda x, y, weight, bias: F.linear(F.silu(x) * y, weight, bias)
    fla.layers.gated_deltanet.causal_conv1d = lambda x, weight, bias, activation, **_: (
        convolved(x, weight, bias, activation),
        None,
    )
    fla.layers.delta_net.fused_recurrent_delta_rule = delta_rule
    fla.layers.gated_deltanet.fused_recurrent_gated_delta_rule = gated_delta_rule
    fla.layers.gla.fused_recurrent_gla = gla
    fla.layers.hgrn2.fused_recurrent_gla = gla
    fla.layers.hgrn2.swish = F.silu
    fla.layers.hgrn2.rms_norm_linear = lambda x, norm_weight, norm_bias, weight, bias, eps=1e-5, **_: F.linear(
        F.rms_norm(x, norm_weight.shape, norm_weight, eps), weight, bias
    )
    activations = {"silu": F.silu, "swish": F.silu, "sqrelu": lambda x: F.relu(x).square()}
    for module in (fla.layers.mamba, fla.layers.rwkv6, modeling_rwkv6, modeling_rwkv7):
        module.ACT2FN = activations
    fla.layers.rwkv6.token_shift = modeling_rwkv6.token_shift = shift
    fla.layers.rwkv6.fused_recurrent_rwkv6 = rwkv6
    fla.layers.rwkv7.token_shift = modeling_rwkv7.token_shift = shift
    fla.layers.rwkv7.fused_addcmul_rwkv7 = torch_addcmul_rwkv7
    fla.layers.rwkv7.fused_k_rwkv7 = k_update_ref
    fla.layers.rwkv7.gate_output_correction = gate_output_correction_ref
    fla.layers.rwkv7.fused_mul_recurrent_rwkv7 = rwkv7
    fla.layers.rwkv7.l2_norm = unit
    shared = {"hidden_size": 8, "num_hidden_layers": 2, "vocab_size": VOCAB, "intermediate_size": 12}
    made = {
        "gla": models.GLAForCausalLM(models.GLAConfig(**shared, num_heads=2)),
        "gla_convolved": models.GLAForCausalLM(
            models.GLAConfig(**shared, num_heads=2, use_short_conv=True, tie_word_embeddings=True, norm_eps=1e-3)
        ),
        "delta_net": models.DeltaNetForCausalLM(models.DeltaNetConfig(**shared, num_heads=2)),
        "delta_net_gated": models.DeltaNetForCausalLM(
            models.DeltaNetConfig(**shared, num_heads=4, use_gate=True, allow_neg_eigval=True, conv_size=3)
        ),
        "gated_deltanet": models.GatedDeltaNetForCausalLM(
            models.GatedDeltaNetConfig(**shared, num_heads=1, num_v_heads=2, head_dim=4)
        ),
        "hgrn2": models.HGRN2ForCausalLM(models.HGRN2Config(**shared, expand_ratio=4)),
        "fla_mamba": models.MambaForCausalLM(
            models.MambaConfig(
                hidden_size=8,
                num_hidden_layers=2,
                vocab_size=VOCAB,
                state_size=5,
                dt_rank=3,
                conv_kernel=3,
                norm_eps=1e-4,
            )
        ),
        "rwkv6_folder": models.RWKV6ForCausalLM(
            models.RWKV6Config(**shared, expand_k=1.0, num_heads=2, proj_low_rank_dim=3, gate_low_rank_dim=5)
        ),
        "rwkv7_folder": models.RWKV7ForCausalLM(
            models.RWKV7Config(
                **shared,
                head_dim=4,
                norm_eps=16e-5,  # times head_dim, the epsilon of RWKV-LM
                decay_low_rank_dim=3,
                gate_low_rank_dim=4,
                a_low_rank_dim=5,
                v_low_rank_dim=6,
            )
        ),
    }
    logits = {}
    for name, model in made.items():
        logits[name] = shaken(model)(torch.tensor([TOKENS]), use_cache=False).logits[0].tolist()
        model.bfloat16().save_pretrained(folder(name))
    return logits


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mamba", type=Path)
    parser.add_argument("rwkv_lm", type=Path)
    parser.add_argument("--only", choices=("mamba", "rwkv", "xlstm", "fla"), help="make the files of one program")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    made = {
        "mamba": lambda: mamba(arguments.mamba),
        "rwkv": lambda: rwkv(arguments.rwkv_lm),
        "xlstm": xlstm,
        "fla": fla,
    }
    path = OUT / "logits.json"
    logits = {} if arguments.only is None else json.loads(path.read_text())["logits"]
    with torch.no_grad():
        for program in made if arguments.only is None else [arguments.only]:
            torch.manual_seed(0)
            logits |= made[program]()
    path.write_text(json.dumps({"tokens": TOKENS, "logits": logits}) + "\n")


if __name__ == "__main__":
    main()

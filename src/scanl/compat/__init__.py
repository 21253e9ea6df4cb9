"""Names and signatures of other libraries over scanl's ops: whoever uses them changes one import.

`scanl.compat.mamba_ssm` stands for mamba-ssm, `scanl.compat.causal_conv1d` for causal-conv1d, and `scanl.compat.fla`
for the functions of flash-linear-attention. They run on every device that the ops run on, with gradients.
"""

"""Names and signatures of other libraries over scanl's ops: whoever uses them changes one import.

`scanl.compat.mamba_ssm` has those of mamba-ssm, `scanl.compat.causal_conv1d` those of causal-conv1d, and
`scanl.compat.fla` those of flash-linear-attention. They run on every device that the ops run on, with gradients.
"""

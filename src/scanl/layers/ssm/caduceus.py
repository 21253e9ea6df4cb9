"""The mixer of Caduceus: Mamba in both directions of time."""

from scanl.layers.registry import preset
from scanl.layers.ssm.vim import BiMamba


@preset("caduceus", divide_out=False)
class CaduceusMixer(BiMamba):
    """BiMamba of Caduceus: the outputs of both directions are added.

    `reverse_complement` around it gives Caduceus-PS. If its input is the reverse complement of a strand, its output is
    the reverse complement of the output for the strand.
    """

    id = "S-caduceus"
    equation = "[u; z] = W_in x,  y = W_out (SSM_f(u, z) + reverse(SSM_b(reverse(u), reverse(z))))"
    source = (
        'Schiff et al., "Caduceus: Bi-Directional Equivariant Long-Range DNA Sequence Modeling", arXiv:2403.03234, '
        "sec. 3.1"
    )

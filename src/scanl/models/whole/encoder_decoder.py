"""An encoder and a decoder of any layers, with attention from the one to the other: translation."""

from typing import Annotated, ClassVar, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from scanl.errors import ConfigError, ShapeError
from scanl.layers.packing import unpack
from scanl.layers.state import Device, DType, State, index, repeat
from scanl.models.block import normed
from scanl.models.embedding import check_tokens, embedded
from scanl.models.presets import whole
from scanl.models.reader import AnyStack, Inputs, Reader
from scanl.models.stack import Stack, StackState, check_causal
from scanl.models.whole.attentive_recurrence import AttentiveRecurrence
from scanl.models.whole.cross_attention import CrossAttention, seen
from scanl.options import WORDS, at_least
from scanl.whole import whole_number

WORDS[Stack] = "a Stack, such as Stack(256, 2, 'lstm')"
WORDS[AttentiveRecurrence] = "an AttentiveRecurrence, such as AttentiveRecurrence(256)"


class Reading(NamedTuple):
    """B sources as a decoder reads them: keys and values (B, S, H, K) for each of its attentions, and their mask.

    It is the same for every step of the decoder, and all that it needs of the sources.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    visible: tuple[Tensor, ...]


@whole("encoder_decoder", "seq2seq", "RNMT+", "RNMT", "transformer_encoder_decoder")
class EncoderDecoder(Reader):
    """Predict the tokens of a sequence from another sequence: an encoder, a decoder, and attention between them.

    The encoder is any stack, also a bidirectional one. The decoder is a `Stack` of causal layers. After each of its
    blocks, or after the first alone, x + attention(x, outputs of the encoder) takes the place of x. A token of the
    decoder costs the same, however many came before, if its layers' states are constant: it keeps these and a
    `Reading` of the source.

    Published models:

    - The best of both worlds (Chen et al., arXiv:1804.09849), the released hybrid: `TransformerEncoder(512, 6)` with
      `Stack(512, 8, "layernorm_lstm", channel_mixer="none")` and attention="first". What the first attention adds stays
      in the residual stream, so all later layers and the output read it. The multi-column encoder of the paper is
      `Columns` of a `TransformerEncoder` and a stack of bidirectional layers.
      Differs: the attention is dot-product, not additive, and its context does not enter the next step's first layer,
      so that training is parallel over time where the layers are.
      Its cascaded encoder is `Cascade` of the recurrent encoder, trained before and frozen, and a `TransformerEncoder`.
    - Modeling recurrence for transformer (Hao et al., arXiv:1904.03092): `recurrence=AttentiveRecurrence(512)` reads
      the embedded source beside the encoder. The last block alone attends to its steps, which is the short-cut that the
      paper finds best: after the encoder's outputs, or at once with `AttentiveRecurrence(512, fusion="gate")`, in a
      gated sum x + λ c + (1 - λ) r with λ = σ(W [c; r]), c what x reads of the encoder's outputs, r of the recurrence's
      steps.
    - Memformer (Wu et al., arXiv:2010.06891): `TransformerEncoder(512, 6, num_slots=32)`. The state of a call is the
      slots, and goes into the next call: the next segment of the same text.

    logits: (B, T, V).   State: the encoder's.
    Initialisation: embeddings and head N(0, 0.02²); stacks as they are.
    """

    name: ClassVar[str] = "encoder and decoder"

    def __init__(
        self,
        vocab_size: Annotated[int, at_least(1), "V, tokens of the decoder"],
        stack: AnyStack,
        decoder: Annotated[Stack, "the causal layers of the decoder"],
        inputs: Inputs,
        *,
        num_heads: Annotated[int, at_least(1), "heads of the attention; a divisor of the decoder's width"] = 8,
        attention: Annotated[
            Literal["every", "first"], 'blocks of the decoder that attend to the encoder: "every" or "first"'
        ] = "every",
        recurrence: Annotated[
            AttentiveRecurrence | None, "further reader of the source, which the last block attends to"
        ] = None,
    ) -> None:
        super().__init__(stack, inputs)
        check_causal(self._who(), decoder)
        if type(decoder).forward is not Stack.forward:
            raise ConfigError(f"{self._who()}: decoder is a {type(decoder).__name__}, expected a Stack")
        if decoder.dim % num_heads:
            raise ConfigError(
                f"{self._who()}: num_heads is {num_heads}, expected a divisor of {decoder.dim}, the decoder's width"
            )
        if recurrence is not None and recurrence.dim != stack.dim:
            raise ConfigError(
                f"{self._who()}: recurrence has dim={recurrence.dim}, expected {stack.dim} of the encoder"
            )
        self.decoder, self.recurrence = decoder, recurrence
        depth = len(decoder.blocks)
        gated = recurrence is not None and recurrence.fusion == "gate"
        if gated and attention == "first" and depth > 1:
            why = "the last block does not attend to the encoder"
            raise ConfigError(f'{self._who()}: fusion is "gate", expected "stack" because {why}')
        self.places = list(range(depth)) if attention == "every" else [0]  # the block after which each attention stands
        self.places += [] if recurrence is None else [depth - 1]
        self.attentions = nn.ModuleList(
            CrossAttention(decoder.dim, stack.dim, num_heads, len(self.places)) for _ in self.places
        )
        self.fusion_gate = nn.Linear(2 * decoder.dim, decoder.dim) if gated else None
        self.embedding = nn.Embedding(vocab_size, decoder.dim)
        self.head = nn.Linear(decoder.dim, vocab_size, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.head.weight, std=0.02)

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> State:
        return self.stack.init_state(batch_size, device=device, dtype=dtype)

    def forward(
        self, source: Tensor, target: Tensor, state: State = None, *, mask: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Map sources (B, S) or (B, S, C), and tokens (B, T), to logits (B, T, V) of the next tokens, and the state.

        target: begins with a token that stands for the beginning.   mask: (B, S) bool, True at valid steps of sources.
        """
        reading, state = self.encode(source, state, mask=mask)
        return self.decode(target, reading)[0], state

    def encode(self, source: Tensor, state: State = None, *, mask: Tensor | None = None) -> tuple[Reading, State]:
        """Read sources (B, S) or (B, S, C). Return what the decoder reads of them, and the state of the encoder."""
        x, offsets, _ = self._input(source, mask, None, None)
        y, state = self.stack(x, state, cu_seqlens=offsets)
        y, x = (y, x) if mask is None else (unpack(y, mask), unpack(x, mask))
        memories = [(y, seen(mask, y))] * len(self.places)
        if self.recurrence is not None:
            steps = self.recurrence(x, memories[0][1])
            memories[-1] = steps, seen(None, steps)
        keys, values = zip(
            *(
                cast(CrossAttention, attention).keys_values(memory)
                for attention, (memory, _) in zip(self.attentions, memories, strict=True)
            ),
            strict=True,
        )
        visible = tuple(visible.expand(len(y), -1, memory.shape[1]) for memory, visible in memories)
        return Reading(keys, values, visible), state

    def decode(self, tokens: Tensor, reading: Reading, state: StackState | None = None) -> tuple[Tensor, StackState]:
        """Read tokens (B, T) after the state of the decoder. Return logits (B, T, V) and its next state."""
        check_tokens(self._who(), "target", tokens)
        if len(tokens) != len(reading.keys[0]):
            raise ShapeError(
                f"{self._who()}: target has {len(tokens)} rows, expected {len(reading.keys[0])} of the sources"
            )

        def after_block(place: int, x: Tensor) -> Tensor:
            gated: list[Tensor] = []
            for at, attention, *operands in zip(self.places, self.attentions, *reading, strict=True):
                if at == place and self.fusion_gate is not None and place == self.places[-1]:
                    gated.append(attention(x, *operands))
                elif at == place:
                    x = x + attention(x, *operands)
            if gated and self.fusion_gate is not None:
                c, r = gated
                share = self.fusion_gate(torch.cat([c, r], -1)).sigmoid()
                x = x + share * c + (1 - share) * r
            return x

        x = embedded(self._who(), self.embedding, tokens)
        x, state = self.decoder.run_blocks(x, state, after_block=after_block)
        return self.head(normed(self.decoder.norm, x)), state

    @torch.no_grad()
    def generate(
        self,
        source: Tensor,
        state: State = None,
        *,
        max_new_tokens: int,
        begin: int = 0,
        end: int = 0,
        beams: int = 1,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """Return the likeliest tokens (B, n) for sources that a search finds, and the encoder's state.

        n is at most `max_new_tokens`; after the token `end` come only tokens `end`. beams: hypotheses of each source,
        1 for greedy search. The best one has the greatest mean log-likelihood of its tokens.
        """
        for name, value in (("max_new_tokens", max_new_tokens), ("beams", beams)):
            whole_number("generate", name, value, 1)
        reading, state = self.encode(source, state, mask=mask)
        rows, past = len(reading.keys[0]), None
        reading = repeat(reading, beams)
        device = self.embedding.weight.device
        tokens = torch.full((rows * beams, 1), begin, device=device)
        total = torch.full((rows, beams), -torch.inf, device=device)
        total[:, 0] = 0.0  # the hypotheses are alike at first, so one of them counts
        length = torch.zeros(rows, beams, device=device)
        ended = torch.zeros(rows, beams, dtype=torch.bool, device=device)
        first = beams * torch.arange(rows, device=device)[:, None]
        for _ in range(max_new_tokens):
            logits, past = self.decode(tokens[:, -1:], reading, past)
            gain = logits[:, 0].float().log_softmax(-1).unflatten(0, (rows, beams))
            stay = torch.full_like(gain, -torch.inf)
            stay[..., end] = 0.0
            gain = torch.where(ended[..., None], stay, gain)
            total, chosen = (total[..., None] + gain).flatten(1).topk(beams)
            origin, token = chosen // gain.shape[-1], chosen % gain.shape[-1]
            length = length.gather(1, origin) + ~ended.gather(1, origin)
            ended = ended.gather(1, origin) | (token == end)
            if beams > 1:
                at = (first + origin).flatten()
                tokens, past = tokens[at], index(past, at)
            tokens = torch.cat([tokens, token.view(-1, 1)], 1)
            if ended.all():
                break
        best = (total / length).argmax(1)
        return tokens.unflatten(0, (rows, beams))[torch.arange(rows, device=device), best, 1:], state

"""Channel mixers of RWKV: what they refuse."""

from scanl.layers.channel.rwkv_channel_mix import RWKV4ChannelMix, RWKV6ChannelMix, RWKV7ChannelMix

REFUSED = [
    (lambda: RWKV7ChannelMix(8, 0), "rwkv7: hidden_dim is 0, expected at least 1"),
    (lambda: RWKV6ChannelMix(8, 0), "rwkv6: hidden_dim is 0, expected at least 1"),
    (lambda: RWKV4ChannelMix(8, 0), "rwkv4: hidden_dim is 0, expected at least 1"),
]

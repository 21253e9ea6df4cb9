from scanl.layers.channel.gated_mlp import GatedMLP as GatedMLP
from scanl.layers.channel.glu import GLU as GLU
from scanl.layers.channel.mlp import MLP as MLP
from scanl.layers.channel.rwkv_channel_mix import RWKV4ChannelMix as RWKV4ChannelMix
from scanl.layers.channel.rwkv_channel_mix import RWKV5ChannelMix as RWKV5ChannelMix
from scanl.layers.channel.rwkv_channel_mix import RWKV6ChannelMix as RWKV6ChannelMix
from scanl.layers.channel.rwkv_channel_mix import RWKV7ChannelMix as RWKV7ChannelMix

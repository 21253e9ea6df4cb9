"""A policy for RecurrentPPO of sb3-contrib. `pip install 'scanl[agents]'`; nothing else of scanl imports it."""

from collections.abc import Mapping
from typing import Any

import torch
from gymnasium import spaces
from sb3_contrib.common.recurrent.policies import (  # pyright: ignore[reportMissingImports]
    RecurrentActorCriticPolicy,
)
from stable_baselines3.common.preprocessing import is_image_space  # pyright: ignore[reportMissingImports]
from stable_baselines3.common.torch_layers import (  # pyright: ignore[reportMissingImports]
    CombinedExtractor,
    FlattenExtractor,
    NatureCNN,
)
from torch import Tensor, nn

from scanl.layers.designation import Designation
from scanl.layers.state import Device, DType, State
from scanl.learning.adapters.agent_body import AgentBody


class RecurrentPolicy(RecurrentActorCriticPolicy):
    """A policy of RecurrentPPO whose memory is any layer. It learns from a whole segment in one scan.

    Args:
        layer, width, depth, layer_options, channel_mixer: of `AgentBody`, the actor's and the critic's.
        features_extractor_class: None for that of sb3's policy for such observations: flat, images, or a dict of them.
        options: further arguments of sb3-contrib's policies, such as net_arch, shared_lstm, enable_critic_lstm.

    The state of any form is what the LSTM's two vectors are: RecurrentPPO stores it in its buffer, and `predict` takes
    and returns it.

    >>> from sb3_contrib import RecurrentPPO
    >>> from scanl.learning.adapters.sb3 import RecurrentPolicy
    >>> model = RecurrentPPO(RecurrentPolicy, "CartPole-v1", policy_kwargs={"layer": "lru", "width": 16}, n_steps=32)
    >>> action, state = model.predict(model.env.reset())
    >>> action, state = model.predict(model.env.reset(), state, episode_start=[False])
    """

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        lr_schedule: Any,
        *,
        layer: Designation = "gru",
        width: int = 128,
        depth: int = 1,
        layer_options: Mapping[str, Any] | None = None,
        channel_mixer: Designation = "none",
        features_extractor_class: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(
            observation_space,
            action_space,
            lr_schedule,
            lstm_hidden_size=width,
            features_extractor_class=features_extractor_class or _extractor(observation_space),
            **options,
        )
        self.body_options = {
            "layer": layer,
            "width": width,
            "depth": depth,
            "layer_options": layer_options,
            "channel_mixer": channel_mixer,
        }
        self.lstm_actor = _StoredBody(self.features_dim, **self.body_options)
        if self.lstm_critic is not None:
            self.lstm_critic = _StoredBody(self.features_dim, **self.body_options)
        self.lstm_hidden_state_shape = (1, 1, self.lstm_actor.hidden_size)
        self.optimizer = self.optimizer_class(self.parameters(), lr=lr_schedule(1), **self.optimizer_kwargs)

    def make_features_extractor(self) -> Any:
        """Return sb3's, with a size that torch takes: of several classes, sb3 adds up integers of numpy."""
        extractor = super().make_features_extractor()
        extractor._features_dim = int(extractor.features_dim)
        return extractor

    @staticmethod
    def _process_sequence(
        features: Tensor, lstm_states: tuple[Tensor, Tensor], episode_starts: Tensor, lstm: "_StoredBody"
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the output (B T, width) and the state after T steps of B rows, which lie one after the other."""
        rows = lstm_states[0].shape[1]
        starts = episode_starts.view(rows, -1) > 0
        y, row = lstm.read(features.view(*starts.shape, -1), torch.cat(lstm_states, 2)[0], starts)
        return y.flatten(0, 1), row[None].chunk(2, 2)

    def actor(self) -> "Actor":
        """Return what chooses actions, as a model for `scanl.export.write`, with the weights of this policy."""
        return Actor(self.pi_features_extractor, self.lstm_actor, self.mlp_extractor.policy_net, self.action_net)

    def _get_constructor_parameters(self) -> dict[str, Any]:
        critic = {"shared_lstm": self.shared_lstm, "enable_critic_lstm": self.enable_critic_lstm}
        return super()._get_constructor_parameters() | self.body_options | critic


class Actor(nn.Module):
    """Map observations (B, T, ...), as sb3's `preprocess_obs` gives them, to what an action is made of.

    y: (B, T, C), the logits of the actions, or the mean of an action of numbers.
    """

    def __init__(self, extractor: nn.Module, body: AgentBody, hidden: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.extractor, self.body, self.hidden, self.head = extractor, body, hidden, head

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> State:
        """Return the state before any step."""
        return self.body.init_state(batch_size, device=device, dtype=dtype)

    def forward(self, x: Tensor, state: State = None) -> tuple[Tensor, State]:
        features = self.extractor(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        y, state = self.body(features, state)
        return self.head(self.hidden(y)), state


class _StoredBody(AgentBody):
    """A body that RecurrentPPO sees as an LSTM of one layer, whose two states are the halves of its row."""

    num_layers = 1

    @property
    def input_size(self) -> int:
        return self.channels

    @property
    def hidden_size(self) -> int:
        return self.row_size // 2


def _extractor(space: spaces.Space) -> Any:
    if isinstance(space, spaces.Dict):
        return CombinedExtractor
    return NatureCNN if is_image_space(space) else FlattenExtractor

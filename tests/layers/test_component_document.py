"""The component document's programs as printed there, by its own names; only its import and its device are replaced.

What a program leaves open, such as `sample`, the test supplies. The document's own classes are a second program of the
same mathematics: with equal weights they give the numbers of the library's.
"""

import hashlib
import math
import re
import typing

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from scanl.errors import ShapeError
from scanl.layers import Bidirectional, LinearRNN, MultiScaleRNN, ShortConvolution
from scanl.models import LanguageModel, Stack
from scanl.ops import linear_attention, linear_scan

DOCUMENT = r'''
### State Management

```python
# Training: parallel over sequence
h_all = parallel_compute(x_all)  # (batch, seq_len, state_dim)

# Inference: sequential, constant memory
h_t = recurrent_step(h_prev, x_t)  # (batch, state_dim)
```

### 3. State Initialization

```python
# Vector state (simple RNN)
state = zeros(batch, hidden_dim)

# Matrix state (key-value style)
state = zeros(batch, num_heads, head_dim, head_dim)

# Multi-component state (complex architectures)
state = {
    'kv_state': zeros(batch, num_heads, head_dim, head_dim),
    'denominator': zeros(batch, num_heads, head_dim),
    'last_token': None
}
```

### Architecture Components

```python
class LinearRNN(NexusModule):
    """Base Linear RNN architecture.

    Provides common infrastructure for linear recurrent models.
    Subclasses implement specific recurrence patterns.

    Args:
        dim: Model dimension
        expand: Hidden expansion factor (default: 2)
        bias: Use bias in projections (default: True)
        use_short_conv: Use convolution for local context (default: True)
        conv_size: Convolution kernel size (default: 4)
    """

    def __init__(
        self,
        dim: int,
        expand: int = 2,
        bias: bool = True,
        use_short_conv: bool = True,
        conv_size: int = 4
    ):
        super().__init__()
        self.dim = dim
        self.expand = expand
        self.hidden_dim = dim * expand

        # Input projection (2x for main branch + gate)
        self.in_proj = nn.Linear(dim, self.hidden_dim * 2, bias=bias)

        # Short convolution
        if use_short_conv:
            self.conv = nn.Conv1d(
                in_channels=self.hidden_dim,
                out_channels=self.hidden_dim,
                kernel_size=conv_size,
                padding=conv_size - 1,  # Causal padding
                groups=self.hidden_dim,  # Depthwise
                bias=bias
            )

        # Output projection
        self.out_proj = nn.Linear(self.hidden_dim, dim, bias=bias)

        # Normalization
        self.norm = nn.LayerNorm(self.hidden_dim)

    def forward(
        self,
        x: torch.Tensor,
        state: Optional[torch.Tensor] = None
    ) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        """
        Args:
            x: Input (batch, seq_len, dim)
            state: Recurrent state (optional)

        Returns:
            output: Output (batch, seq_len, dim)
            state: Updated state
        """
        batch_size, seq_len, _ = x.shape

        # Project input
        xz = self.in_proj(x)
        x_branch, z = xz.chunk(2, dim=-1)

        # Apply short convolution
        if hasattr(self, 'conv'):
            x_branch = x_branch.transpose(1, 2)  # (B, H, L)
            x_branch = self.conv(x_branch)[:, :, :seq_len]  # Causal
            x_branch = x_branch.transpose(1, 2)  # (B, L, H)

        # Activation
        x_branch = F.silu(x_branch)

        # Recurrent computation (subclass-specific)
        y, state = self.recurrent_forward(x_branch, state)

        # Normalize and gate
        y = self.norm(y)
        y = y * F.silu(z)

        # Project output
        output = self.out_proj(y)

        return output, state

    def recurrent_forward(
        self,
        x: torch.Tensor,
        state: Optional[torch.Tensor] = None
    ) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        """Recurrent computation. Override in subclasses."""
        return x, state
```

### Short Convolution Component

```python
class ShortConvolution(NexusModule):
    """Short depthwise convolution for local context.

    Captures local patterns before recurrent processing.
    Supports both parallel and incremental modes.

    Args:
        dim: Channel dimension
        kernel_size: Convolution kernel size (default: 4)
        bias: Use bias (default: True)
        causal: Causal convolution (default: True)
    """

    def __init__(
        self,
        dim: int,
        kernel_size: int = 4,
        bias: bool = True,
        causal: bool = True
    ):
        super().__init__()
        self.dim = dim
        self.kernel_size = kernel_size
        self.causal = causal

        padding = kernel_size - 1 if causal else kernel_size // 2

        self.conv = nn.Conv1d(
            in_channels=dim,
            out_channels=dim,
            kernel_size=kernel_size,
            padding=padding,
            groups=dim,  # Depthwise
            bias=bias
        )

    def forward(
        self,
        x: torch.Tensor,
        state: Optional[torch.Tensor] = None
    ) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        """
        Args:
            x: Input (batch, seq_len, dim)
            state: Conv cache for incremental decoding

        Returns:
            output: Convolved output
            state: Updated conv cache
        """
        batch_size, seq_len, dim = x.shape

        # Incremental decoding (single token)
        if state is not None and seq_len == 1:
            # Concatenate with cached history
            x_cache = torch.cat([state, x], dim=1)
            x_cache = x_cache.transpose(1, 2)
            y = self.conv(x_cache)[:, :, -1:]
            y = y.transpose(1, 2)

            # Update cache (keep last kernel_size-1 positions)
            new_state = x_cache.transpose(1, 2)[:, -(self.kernel_size-1):, :]
            return y, new_state

        # Parallel processing (full sequence)
        x = x.transpose(1, 2)  # (B, dim, seq)
        y = self.conv(x)

        if self.causal:
            y = y[:, :, :seq_len]  # Trim excess

        y = y.transpose(1, 2)  # (B, seq, dim)

        # Cache for future incremental decoding
        if seq_len >= self.kernel_size - 1:
            new_state = x.transpose(1, 2)[:, -(self.kernel_size-1):, :]
        else:
            new_state = x.transpose(1, 2)

        return y, new_state
```

### Common Recurrence Patterns

```python
# 1. Exponential decay (RWKV-style)
def exponential_decay_recurrence(k, v, w, state):
    """
    Args:
        k: Key (batch, seq, heads, head_dim)
        v: Value (batch, seq, heads, head_dim)
        w: Decay (batch, seq, heads, head_dim)
        state: (batch, heads, head_dim, head_dim)
    """
    outputs = []
    for t in range(seq_len):
        # Apply decay
        decay = torch.exp(w[:, t])  # (batch, heads, head_dim)
        state = state * decay.unsqueeze(-1)

        # Add new key-value
        kv = torch.einsum('bhd,bhe->bhde', k[:, t], v[:, t])
        state = state + kv

        outputs.append(state)

    return torch.stack(outputs, dim=1), state


# 2. Linear SSM (S4-style)
def linear_ssm_recurrence(x, A, B, C, state):
    """
    Args:
        x: Input (batch, seq, dim)
        A: Transition (state_dim, state_dim)
        B: Input projection (state_dim, dim)
        C: Output projection (dim, state_dim)
        state: (batch, state_dim)
    """
    outputs = []
    for t in range(seq_len):
        # State update: h = A @ h + B @ x
        state = torch.matmul(state, A.T) + torch.matmul(x[:, t], B.T)

        # Output: y = C @ h
        y = torch.matmul(state, C.T)
        outputs.append(y)

    return torch.stack(outputs, dim=1), state


# 3. Gated update (retention-style)
def gated_recurrence(q, k, v, decay, state):
    """
    Args:
        q, k, v: Query, Key, Value (batch, seq, heads, head_dim)
        decay: Decay factor per head (heads,)
        state: (batch, heads, head_dim, head_dim)
    """
    outputs = []
    for t in range(seq_len):
        # Decay state
        state = decay.view(1, -1, 1, 1) * state

        # Add outer product
        kv = torch.einsum('bhd,bhe->bhde', k[:, t], v[:, t])
        state = state + kv

        # Query state
        o = torch.einsum('bhd,bhde->bhe', q[:, t], state)
        outputs.append(o)

    return torch.stack(outputs, dim=1), state
```

### Example 1: Basic Linear RNN Usage

```python
import torch
from nexus.components.ssm import LinearRNN, ShortConvolution

# Create base linear RNN
model = LinearRNN(
    dim=512,
    expand=2,
    use_short_conv=True,
    conv_size=4
)

# Forward pass (training)
x = torch.randn(2, 100, 512)  # (batch, seq_len, dim)
output, state = model(x)
print(f"Output shape: {output.shape}")  # (2, 100, 512)
print(f"State shape: {state.shape}")    # (2, 1024) - expanded dim

# Incremental decoding (inference)
state = model.init_state(batch_size=1, device='cuda')
for t in range(100):
    x_t = torch.randn(1, 1, 512).cuda()  # Single token
    output_t, state = model(x_t, state)
    print(f"Step {t}: {output_t.shape}")  # (1, 1, 512)
```

### Example 2: Custom Recurrence Implementation

```python
class MyCustomRNN(LinearRNN):
    """Custom linear RNN with specific recurrence pattern."""

    def __init__(self, dim, expand=2):
        super().__init__(dim, expand)

        # Custom parameters for recurrence
        self.W_state = nn.Linear(self.hidden_dim, self.hidden_dim, bias=False)
        self.decay = nn.Parameter(torch.randn(self.hidden_dim))

    def recurrent_forward(self, x, state):
        """Implement custom recurrence."""
        batch_size, seq_len, hidden_dim = x.shape

        if state is None:
            state = torch.zeros(batch_size, hidden_dim, device=x.device)

        outputs = []
        for t in range(seq_len):
            # Custom recurrence: h = decay * h + W @ x
            state = torch.sigmoid(self.decay) * state + self.W_state(x[:, t])
            outputs.append(state)

        output = torch.stack(outputs, dim=1)
        return output, state

# Use custom RNN
custom_rnn = MyCustomRNN(dim=512)
x = torch.randn(2, 100, 512)
output, state = custom_rnn(x)
```

### Example 3: Short Convolution for Local Context

```python
from nexus.components.ssm import ShortConvolution

# Create short convolution
conv = ShortConvolution(
    dim=512,
    kernel_size=4,
    causal=True
)

# Parallel mode (training)
x = torch.randn(2, 100, 512)
y, cache = conv(x)
print(f"Output shape: {y.shape}")  # (2, 100, 512)

# Incremental mode (inference)
cache = None
for t in range(10):
    x_t = torch.randn(2, 1, 512)
    y_t, cache = conv(x_t, cache)
    print(f"Step {t}: output {y_t.shape}, cache {cache.shape}")
    # output (2, 1, 512), cache (2, 3, 512) - last k-1 tokens
```

### Example 4: Implementing a Simple Exponential Decay RNN

```python
class ExponentialDecayRNN(LinearRNN):
    """Linear RNN with exponential decay (like RWKV)."""

    def __init__(self, dim, expand=2, num_heads=8):
        super().__init__(dim, expand)
        self.num_heads = num_heads
        self.head_dim = self.hidden_dim // num_heads

        # Per-head decay factors
        self.decay = nn.Parameter(torch.randn(num_heads, self.head_dim))

        # Projections
        self.k_proj = nn.Linear(self.hidden_dim, self.hidden_dim, bias=False)
        self.v_proj = nn.Linear(self.hidden_dim, self.hidden_dim, bias=False)

    def recurrent_forward(self, x, state):
        batch, seq_len, _ = x.shape

        # Initialize state (matrix-valued)
        if state is None:
            state = torch.zeros(
                batch, self.num_heads, self.head_dim, self.head_dim,
                device=x.device, dtype=x.dtype
            )

        # Project to K, V
        k = self.k_proj(x).view(batch, seq_len, self.num_heads, self.head_dim)
        v = self.v_proj(x).view(batch, seq_len, self.num_heads, self.head_dim)

        # Recurrent processing
        outputs = []
        decay_factor = torch.sigmoid(self.decay)  # Bound to (0, 1)

        for t in range(seq_len):
            # Decay state
            state = state * decay_factor.unsqueeze(0).unsqueeze(-1)

            # Add new key-value
            kv = torch.einsum('bhd,bhe->bhde', k[:, t], v[:, t])
            state = state + kv

            # Read from state
            output_t = torch.einsum('bhde,bhe->bhd', state, v[:, t])
            outputs.append(output_t)

        # Stack and reshape
        output = torch.stack(outputs, dim=1)
        output = output.reshape(batch, seq_len, self.hidden_dim)

        return output, state

# Usage
rnn = ExponentialDecayRNN(dim=512, num_heads=8)
x = torch.randn(2, 100, 512)
output, state = rnn(x)
print(f"Output: {output.shape}, State: {state.shape}")
# Output: (2, 100, 512), State: (2, 8, 64, 64)
```

### 1. State Size Selection

```python
# Vector states: simple tasks, short-term dependencies
state_dim = d_model  # O(d)

# Matrix states: complex tasks, long-range dependencies
state_dim = (num_heads, head_dim, head_dim)  # O(h × d²/h²)
```

### 2. Convolution Kernel Size

```python
# Too small: insufficient local context
conv_size = 2  # ❌ Not recommended

# Good: captures 3-4 token window
conv_size = 3-4  # ✅ Recommended

# Too large: expensive, defeats purpose
conv_size = 16  # ❌ Use attention instead
```

### 3. Expansion Factor

```python
# Small: efficient but limited capacity
expand = 1  # ❌ Too restrictive

# Good: standard setting
expand = 2  # ✅ Recommended

# Large: high capacity but expensive
expand = 4  # ✅ For large models only
```

### 4. Gating Mechanisms

```python
# Bad: no gating
output = recurrence(x)

# Good: multiplicative gating
x_main, z = split(project(x))
y = recurrence(x_main)
output = y * sigmoid(z)  # ✅ Gated output
```

### 5. Normalization Placement

```python
# Correct order
y = recurrence(x)
y = LayerNorm(y)      # Normalize first
y = y * silu(gate)    # Then gate
output = project(y)

# Wrong order (unstable)
y = recurrence(x)
y = y * silu(gate)    # ❌ Gate first
y = LayerNorm(y)      # Then normalize
```

### 6. Initialization

```python
# Decay parameters: start near 1 (long memory)
decay = nn.Parameter(torch.ones(dim) * 0.9)

# Projection matrices: Xavier/Kaiming
nn.init.xavier_uniform_(self.in_proj.weight)
nn.init.kaiming_uniform_(self.out_proj.weight)

# Bias: zeros
nn.init.zeros_(self.in_proj.bias)
```

### 7. Incremental Decoding

```python
# Initialize state once
state = model.init_state(batch_size=1, device='cuda')

# Generate tokens
generated = []
for _ in range(max_tokens):
    # Single token forward
    logits, state = model(input_ids, state)

    # Sample next token
    next_token = sample(logits[:, -1])
    generated.append(next_token)

    # Use next token as input
    input_ids = next_token.unsqueeze(0)

# ✅ State is properly maintained across steps
```

### 1. State Shape Mismatch

```python
# ❌ Wrong: state shape doesn't match batch size
state = torch.zeros(1, dim)  # batch=1
x = torch.randn(8, seq_len, dim)  # batch=8
output, state = model(x, state)  # Error!

# ✅ Correct: match batch sizes
state = torch.zeros(8, dim)
output, state = model(x, state)
```

### 2. Forgetting Causal Padding

```python
# ❌ Wrong: non-causal padding sees future
conv = nn.Conv1d(dim, dim, kernel_size=4, padding=2)

# ✅ Correct: causal padding
conv = nn.Conv1d(dim, dim, kernel_size=4, padding=3)
y = conv(x)[:, :, :seq_len]  # Trim excess
```

### 3. Not Using Depthwise Convolution

```python
# ❌ Wrong: full convolution is expensive
conv = nn.Conv1d(512, 512, kernel_size=4)  # 512×512×4 params

# ✅ Correct: depthwise convolution
conv = nn.Conv1d(512, 512, kernel_size=4, groups=512)  # 512×4 params
```

### 4. Improper State Updates

```python
# ❌ Wrong: creating new state instead of updating
def forward(x, state):
    state = torch.zeros_like(state)  # Erases memory!
    ...

# ✅ Correct: update existing state
def forward(x, state):
    state = decay * state + update  # Maintains memory
    ...
```

### 5. Parallel vs Sequential Confusion

```python
# ❌ Wrong: using recurrence during training
if self.training:
    for t in range(seq_len):  # Slow!
        state = recurrence(state, x[:, t])

# ✅ Correct: use parallel method during training
if self.training:
    output = parallel_scan(x)  # Fast!
else:
    output = recurrence(x, state)  # Necessary for inference
```

### 1. Parallel Scan Algorithm

```python
def parallel_scan(inputs, decay):
    """Compute recurrence in O(log n) parallel steps.

    Args:
        inputs: (batch, seq_len, dim)
        decay: Decay factor (scalar or per-dim)

    Returns:
        outputs: Cumulative scan (batch, seq_len, dim)
    """
    # Binary tree reduction
    n = inputs.shape[1]
    log_n = math.ceil(math.log2(n))

    # Upsweep: compute partial products
    for d in range(log_n):
        stride = 2 ** (d + 1)
        for i in range(stride - 1, n, stride):
            inputs[:, i] = (
                decay * inputs[:, i - stride // 2] +
                inputs[:, i]
            )

    # Downsweep: propagate results
    for d in range(log_n - 1, -1, -1):
        stride = 2 ** (d + 1)
        for i in range(3 * stride // 2 - 1, n, stride):
            inputs[:, i] = (
                decay * inputs[:, i - stride // 2] +
                inputs[:, i]
            )

    return inputs
```

### 2. Chunk-wise Processing

```python
def chunk_wise_recurrence(x, state, chunk_size=64):
    """Process sequence in chunks.

    Args:
        x: Input (batch, seq_len, dim)
        state: Initial state
        chunk_size: Chunk size for processing
    """
    outputs = []

    for i in range(0, x.shape[1], chunk_size):
        chunk = x[:, i:i+chunk_size]

        # Process chunk in parallel
        chunk_output, state = process_chunk(chunk, state)
        outputs.append(chunk_output)

    return torch.cat(outputs, dim=1), state
```

### 3. Bi-directional Processing

```python
class BidirectionalLinearRNN(LinearRNN):
    """Bi-directional linear RNN."""

    def __init__(self, dim, expand=2):
        super().__init__(dim, expand)
        self.backward_rnn = LinearRNN(dim, expand)

    def forward(self, x, state_fwd=None, state_bwd=None):
        # Forward pass
        y_fwd, state_fwd = super().forward(x, state_fwd)

        # Backward pass
        x_rev = torch.flip(x, [1])
        y_bwd, state_bwd = self.backward_rnn(x_rev, state_bwd)
        y_bwd = torch.flip(y_bwd, [1])

        # Combine
        output = y_fwd + y_bwd

        return output, (state_fwd, state_bwd)
```

### 4. Multi-Scale Recurrence

```python
class MultiScaleRNN(LinearRNN):
    """RNN with multiple time scales."""

    def __init__(self, dim, expand=2, num_scales=4):
        super().__init__(dim, expand)
        self.num_scales = num_scales

        # Different decay rates per scale
        self.decays = nn.Parameter(
            torch.linspace(0.1, 0.9, num_scales)
        )

    def recurrent_forward(self, x, states):
        if states is None:
            states = [None] * self.num_scales

        outputs = []
        new_states = []

        for i, decay in enumerate(self.decays):
            # Process with this time scale
            y, state = self.scale_recurrence(x, states[i], decay)
            outputs.append(y)
            new_states.append(state)

        # Combine scales
        output = sum(outputs) / self.num_scales

        return output, new_states
```
'''


class NexusModule(nn.Module):
    """The base class of the document's modules, which it does not print."""


SUPPLIED = {"torch": torch, "nn": nn, "F": F, "math": math, "NexusModule": NexusModule}
SUPPLIED |= {name: getattr(typing, name) for name in ("Optional", "Tuple")}


def printed(title):
    """The program under a heading. Its module stands in `scanl.layers`, and its device is the CPU."""
    section = re.split(rf"^#+ {re.escape(title)}$", DOCUMENT, flags=re.MULTILINE)[1]
    (program,) = re.match(r"\n+```python\n(.*?)```", section, re.DOTALL).groups()
    program = program.replace("from nexus.components.ssm import", "from scanl.layers import")
    return program.replace(".cuda()", "").replace("device='cuda'", "device='cpu'")


def run(title, **names):
    """The names that a program leaves, after it has run with `names` beside what it imports above."""
    scope = SUPPLIED | names
    exec(compile(printed(title), title, "exec"), scope)
    return scope


def example(number, **names):
    (title,) = re.findall(rf"^### (Example {number}: .*)$", DOCUMENT, re.MULTILINE)
    return run(title, **names)


THEIRS = run("Architecture Components")["LinearRNN"]  # whose recurrence is none: what it reads


def alike(theirs, ours, x):
    """Two programs with the same weights give the same outputs, and ours the same in pieces."""
    weights = ours.state_dict()
    theirs.load_state_dict({name: weights[name] for name in theirs.state_dict()})
    expected, state = theirs(x)
    whole, last = ours(x)
    torch.testing.assert_close(whole, expected)
    first, carried = ours(x[:, :3])
    steps = [first]
    for t in range(3, x.shape[1]):
        y, carried = ours(x[:, t : t + 1], carried)
        steps.append(y)
    torch.testing.assert_close(torch.cat(steps, 1), expected)
    assert carried.shape == last.shape == state.shape
    torch.testing.assert_close(carried.recurrent, state)


def test_the_document_stands_here_word_for_word():
    assert (
        hashlib.sha256(DOCUMENT.encode()).hexdigest()
        == "cd16316665214203aaabf8c39cba88ba2e47dd4d4319429eb5d7cf22667e8014"
    )


def test_calls_by_position_are_those_of_the_document():
    ours, theirs = LinearRNN(12, 3, False, True, 5), THEIRS(12, 3, False, True, 5)
    missing = {"decay"}  # the recurrence that ours has by itself
    assert {name: value.shape for name, value in ours.state_dict().items() if name not in missing} == {
        name: value.shape for name, value in theirs.state_dict().items()
    }
    for name in ("dim", "expand", "hidden_dim"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert not hasattr(LinearRNN(12, 2, True, False), "conv")
    assert LinearRNN(12, use_short_conv=False).init_state(1).conv is None
    short = ShortConvolution(12, 3, False, True)
    assert (short.dim, short.kernel_size, short.causal, short.conv.bias) == (12, 3, True, None)


@pytest.mark.parametrize(
    "options", [{}, {"use_short_conv": False}, {"expand": 1, "bias": False, "conv_size": 2}], ids=str
)
def test_the_printed_block_with_a_recurrence_of_ones_own(options):
    def leaky(base):
        class Leaky(base):
            def recurrent_forward(self, x, state=None):
                return linear_scan(x, torch.full_like(x, 0.9), state)

        return Leaky(6, **options)

    alike(leaky(THEIRS), leaky(LinearRNN), torch.randn(2, 8, 6))


def test_the_printed_forward_runs_in_a_subclass_of_ours():
    """Whoever overrides `forward` as it is printed calls `self.conv`, which is padded for it."""

    class Printed(LinearRNN):
        forward, recurrent_forward = THEIRS.forward, THEIRS.recurrent_forward

    model, x = Printed(6), torch.randn(2, 8, 6)
    theirs = THEIRS(6)
    theirs.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(x)[0], theirs(x)[0])


def test_example_1(capsys):
    example(1)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["Output shape: torch.Size([2, 100, 512])", "State shape: torch.Size([2, 1024])"]
    assert lines[2:] == [f"Step {t}: torch.Size([1, 1, 512])" for t in range(100)]


def test_example_2():
    names = example(2, LinearRNN=LinearRNN)
    assert names["output"].shape == (2, 100, 512)
    assert names["state"].shape == (2, 1024)
    alike(example(2, LinearRNN=THEIRS)["MyCustomRNN"](dim=6), names["MyCustomRNN"](dim=6), torch.randn(2, 8, 6))


def test_example_2_begins_from_a_tensor():
    model = example(2, LinearRNN=LinearRNN)["MyCustomRNN"](dim=6)
    x, state = torch.randn(2, 8, 6), torch.randn(2, 12)
    theirs = example(2, LinearRNN=THEIRS)["MyCustomRNN"](dim=6)
    theirs.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(x, state)[0], theirs(x, state)[0])
    with pytest.raises(ShapeError, match=r"MyCustomRNN: state.recurrent has shape \(1, 12\), expected \(2, ...\)"):
        model(x, state[:1])


def test_example_3(capsys):
    names = example(3)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Output shape: torch.Size([2, 100, 512])"
    assert lines[-1] == "Step 9: output torch.Size([2, 1, 512]), cache torch.Size([2, 3, 512])"
    assert names["conv"].causal


@pytest.mark.parametrize(("kernel_size", "causal"), [(4, True), (1, True), (3, False), (4, False)])
def test_the_printed_short_convolution(kernel_size, causal):
    theirs = run("Short Convolution Component")["ShortConvolution"](6, kernel_size, causal=causal)
    ours, x = ShortConvolution(dim=6, kernel_size=kernel_size, causal=causal), torch.randn(2, 8, 6)
    theirs.load_state_dict(ours.state_dict())
    expected, last = theirs(x)
    y, cache = ours(x)
    torch.testing.assert_close(y, expected[:, :8])  # an even centred window gives one step too many as printed
    torch.testing.assert_close(cache, last if kernel_size > 1 else last[:, :0])  # which is [-0:], the whole, as printed
    if causal and kernel_size > 1:  # of one step, y as printed is read where the padding is, and not at the step
        torch.testing.assert_close(ours(x[:, :1], cache)[1], theirs(x[:, :1], last)[1])


def test_a_centred_window_continues_what_was_read():
    layer, x = ShortConvolution(dim=6, kernel_size=5, causal=False), torch.randn(2, 8, 6)
    _, cache = layer(x[:, :4])
    torch.testing.assert_close(layer(x[:, 4:], cache)[0], layer(x)[0][:, 4:])


def test_example_4(capsys):
    example(4, LinearRNN=LinearRNN)
    # The comment has (2, 8, 64, 64); 8 heads of 2 * 512 channels have 128 each.
    assert "State: torch.Size([2, 8, 128, 128])" in capsys.readouterr().out
    matrix = [example(4, LinearRNN=base)["ExponentialDecayRNN"](dim=6, num_heads=2) for base in (THEIRS, LinearRNN)]
    alike(*matrix, torch.randn(2, 8, 6))


def test_common_recurrence_patterns():
    names = run("Common Recurrence Patterns", seq_len=5)
    q, k, v = (torch.randn(2, 5, 3, 4) for _ in range(3))
    state, g = torch.randn(2, 3, 4, 4), -torch.rand(2, 5, 3, 4)
    states, last = names["exponential_decay_recurrence"](k, v, g, state)
    y, ours = linear_attention(q, k, v, g, state=state, scale=1.0)
    torch.testing.assert_close(torch.einsum("bthd,bthde->bthe", q, states), y)
    torch.testing.assert_close(last, ours)
    decay = torch.rand(3)
    y, last = names["gated_recurrence"](q, k, v, decay, state)
    theirs = linear_attention(q, k, v, decay.log().expand(2, 5, 3), state=state, scale=1.0)
    torch.testing.assert_close((y, last), theirs)
    x, A, B, C = torch.randn(2, 5, 3), torch.diag(torch.rand(4)), torch.randn(4, 3), torch.randn(2, 4)
    y, last = names["linear_ssm_recurrence"](x, A, B, C, torch.zeros(2, 4))
    h, ours = linear_scan(x @ B.T, A.diagonal())
    torch.testing.assert_close((y, last), (h @ C.T, ours))


def test_states_of_every_form_that_the_document_has():
    names = run("3. State Initialization", zeros=torch.zeros, batch=2, hidden_dim=12, num_heads=2, head_dim=3)

    class Several(LinearRNN):
        def recurrent_forward(self, x, state):
            state = state or names["state"]
            total = state["denominator"] + x.mean(1).view(2, 2, -1)[..., :3]
            return x, {**state, "denominator": total}

    model, x = Several(6, use_short_conv=False), torch.randn(2, 4, 6)
    state = model(x, model(x)[1])[1].recurrent
    assert state.keys() == {"kv_state", "denominator", "last_token"}
    torch.testing.assert_close(model(x, names["state"])[1].recurrent["denominator"], 0.5 * state["denominator"])


def test_state_management():
    model, x = LinearRNN(6), torch.randn(2, 1, 6)
    names = run(
        "State Management", parallel_compute=lambda x: model(x)[0], recurrent_step=lambda h, x: model.step(x, h)[0],
        x_all=x, x_t=x[:, 0], h_prev=model.init_state(2),
    )  # fmt: skip
    torch.testing.assert_close(names["h_t"], names["h_all"][:, 0])


@pytest.mark.parametrize(
    ("title", "option"), [("2. Convolution Kernel Size", "conv_size"), ("3. Expansion Factor", "expand")]
)
def test_best_practices_are_options(title, option):
    value = run(title)[option]
    assert getattr(LinearRNN(dim=8, **{option: value}), option) == value


def test_best_practices_of_the_body():
    dim, seen = 8, torch.randn(2, 5, 8)
    run("1. State Size Selection", d_model=dim, num_heads=2, head_dim=4)
    body = {"recurrence": lambda x: 0.5 * x, "sigmoid": torch.sigmoid, "silu": F.silu, "project": lambda x: x}
    body |= {
        "x": seen,
        "gate": seen,
        "split": lambda x: x.chunk(2, -1),
        "LayerNorm": lambda y: F.layer_norm(y, y.shape[-1:]),
    }
    assert run("4. Gating Mechanisms", **body)["output"].shape == (2, 5, 4)
    run("5. Normalization Placement", **body)
    layer = LinearRNN(dim)
    with torch.no_grad():
        layer.in_proj.bias.fill_(1)
    names = run("6. Initialization", self=layer, dim=dim)
    assert not layer.in_proj.bias.any()
    layer.decay = names["decay"]


def test_incremental_decoding_generates():
    model = LanguageModel(11, Stack(8, 1, "linear_rnn")).eval()
    prompt = torch.tensor([[3, 1, 4]])
    greedy = lambda logits: logits.argmax(-1)  # noqa: E731
    names = run("7. Incremental Decoding", model=model, sample=greedy, max_tokens=6, input_ids=prompt)
    generated = list(model.generate(prompt, max_new_tokens=6, temperature=0))
    torch.testing.assert_close(torch.stack(names["generated"]), torch.stack(generated).view(6, 1))


def test_pitfall_of_a_state_of_another_batch():
    """The first half of the program is an error, as its comment says; the second begins from a tensor."""
    wrong, right = printed("1. State Shape Mismatch").split("# ✅")
    scope = {"torch": torch, "model": LinearRNN(6, expand=1), "dim": 6, "seq_len": 5}
    with pytest.raises(ShapeError, match=r"'state.recurrent': \(1, 6\).* expected .*'state.recurrent': \(8, 6\)"):
        exec(wrong, scope)
    exec("# " + right, scope)
    assert scope["state"].shape == (8, 6)
    torch.testing.assert_close(scope["output"], scope["model"](scope["x"])[0])


def test_other_pitfalls():
    x = torch.randn(2, 8, 5)
    names = run("2. Forgetting Causal Padding", dim=8, x=x, seq_len=5)
    torch.testing.assert_close(names["conv"](x[..., :3])[..., :3], names["y"][..., :3])
    assert run("3. Not Using Depthwise Convolution")["conv"].weight.shape == ShortConvolution(512).conv.weight.shape
    assert callable(run("4. Improper State Updates")["forward"])
    layer, x = LinearRNN(6), torch.randn(2, 5, 6)
    for training, recurrence in ((True, lambda state, x_t: layer.step(x_t, state)[1]), (False, layer)):
        layer.train(training)
        names = {"self": layer, "x": x, "state": layer.init_state(2), "recurrence": recurrence}
        names = run("5. Parallel vs Sequential Confusion", **names, seq_len=5, parallel_scan=layer)
        torch.testing.assert_close(names["output"][0], layer(x)[0])


def test_parallel_scan():
    """As printed it adds up; with a decay it multiplies once where it should by a power of it."""
    scan = run("1. Parallel Scan Algorithm")["parallel_scan"]
    for steps in (1, 2, 7, 16, 33):
        x = torch.randn(2, steps, 3, dtype=torch.float64)
        expected, _ = linear_scan(x, torch.ones(3, dtype=torch.float64))
        torch.testing.assert_close(scan(inputs=x.clone(), decay=1.0), expected)
    decayed = linear_scan(x, torch.full((3,), 0.5, dtype=torch.float64))[0]
    assert not torch.allclose(scan(x.clone(), 0.5), decayed)


def test_chunk_wise_recurrence_begins_from_a_tensor():
    model, x = LinearRNN(dim=6, expand=2), torch.randn(2, 150, 6)
    chunked = run("2. Chunk-wise Processing", process_chunk=model)["chunk_wise_recurrence"]
    for state in (None, torch.zeros(2, 12), torch.randn(2, 12), model.init_state(2)):
        for size in ({}, {"chunk_size": 7}):
            y, last = chunked(x, state, **size)
            torch.testing.assert_close((y, last), model(x, state))


def test_bidirectional():
    """The printed class over ours; and ours, which is made of a forward and a backward layer."""
    theirs = run("3. Bi-directional Processing", LinearRNN=LinearRNN)["BidirectionalLinearRNN"](dim=6, expand=2)
    ours, x = Bidirectional(6, "linear_rnn", layer_options={"expand": 2}), torch.randn(2, 8, 6)
    weights = {f"forward_layer.{name}": value for name, value in theirs.state_dict().items() if "backward" not in name}
    weights |= {f"backward_layer.{name}": value for name, value in theirs.backward_rnn.state_dict().items()}
    ours.load_state_dict(weights)
    y, (ahead, behind) = theirs(x)
    torch.testing.assert_close(ours(x)[0], y)
    assert ahead.shape == behind.shape == (2, 12)
    y, _ = theirs(x, state_fwd=ahead, state_bwd=behind)
    back, _ = theirs.backward_rnn(x.flip(1), behind)
    torch.testing.assert_close(y, LinearRNN.forward(theirs, x, ahead)[0] + back.flip(1))


def test_multi_scale():
    """The printed class, whose recurrence of one scale is left open, over ours; and ours by the same names."""
    base = run("4. Multi-Scale Recurrence", LinearRNN=LinearRNN)["MultiScaleRNN"]

    class Supplied(base):
        def scale_recurrence(self, x, state, decay):
            return linear_scan(x, decay.expand(x.shape[2]), state)

    theirs, ours = Supplied(dim=6, expand=2, num_scales=3), MultiScaleRNN(dim=6, expand=2, num_scales=3)
    weights = theirs.state_dict()
    ours.load_state_dict(
        {**{name: weights[name] for name in weights if name != "decays"}, "decay": weights["decays"].logit()}
    )
    x = torch.randn(2, 8, 6)
    whole, states = theirs(x)
    torch.testing.assert_close(ours(x)[0], whole)
    torch.testing.assert_close(ours(x)[1].recurrent, torch.stack(states.recurrent, 1))
    first, state = theirs(x[:, :3])
    torch.testing.assert_close(torch.cat([first, theirs(x[:, 3:], state)[0]], 1), whole)
    torch.testing.assert_close(theirs(x, list(states.recurrent))[0], ours(x, torch.stack(states.recurrent, 1))[0])

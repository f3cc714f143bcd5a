"""Settings of all tests."""

from __future__ import annotations

import torch
from hypothesis import settings

from tests.sizes import sized

# Tensors here are small and the cores are shared: a second thread costs more than it gives.
torch.set_num_threads(1)
# A shared machine has no reliable deadline.
settings.register_profile("hisparse", deadline=None, max_examples=sized(50, 1000))
settings.load_profile("hisparse")

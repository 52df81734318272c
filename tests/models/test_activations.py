"""Activation functions compared with transformers."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.activations import ACT2FN

from cirag_jax.models.activations import TRANSFORMERS_NAMES, activate


@pytest.mark.parametrize("name", TRANSFORMERS_NAMES)
def test_activate_equals_transformers(name):
    x = np.linspace(-6.0, 6.0, 101, dtype=np.float32)
    wanted = ACT2FN[name](torch.from_numpy(x)).numpy()
    actual = activate(jnp.asarray(x), TRANSFORMERS_NAMES[name])
    np.testing.assert_allclose(actual, wanted, rtol=0, atol=1e-6)

"""The settings of Falcon-H1 in addition to Llama's, in the form of config.json. Files have no factors: weights do."""

from __future__ import annotations

from quire.compute.gguf.named_settings import Settings, StateSpace


def falcon_h1(settings: Settings) -> dict[str, object]:
    """Return the settings of Falcon-H1."""
    rule = StateSpace.of(settings)
    return {
        "head_dim": settings.head_size,
        "mamba_d_ssm": rule.num_heads * rule.head_size,
        "mamba_n_heads": rule.num_heads,
        "mamba_n_groups": rule.num_groups,
        "mamba_d_state": rule.state_size,
        "mamba_d_conv": rule.filter_width,
        "mamba_conv_bias": rule.has_bias,
        "mamba_rms_norm": any(name.endswith(".ssm_norm.weight") for name in settings.tensors),
        "mamba_norm_before_gate": False,
    }

"""A small random Nemotron-H checkpoint that the engine loads: ``python tiny_nemotron_h.py FOLDER``.

Three Mamba2 layers (8 heads of 64, dstate 128, 2 groups: of the family's geometry only the head count is
small), one attention layer, two MLPs; 2.6 M parameters in bf16.
"""

from __future__ import annotations

import sys
from pathlib import Path

VOCABULARY = 512


def write(folder: Path) -> None:
    """Write config and weights; the same ones every time."""
    import torch
    from transformers import NemotronHConfig, NemotronHForCausalLM

    torch.manual_seed(20)
    config = NemotronHConfig(
        architectures=["NemotronHForCausalLM"], vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512,
        num_hidden_layers=6, max_position_embeddings=2048,
        layers_block_type=["linear_attention", "mlp", "linear_attention", "full_attention", "linear_attention", "mlp"],
        num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        mamba_num_heads=8, mamba_head_dim=64, ssm_state_size=128, n_groups=2, chunk_size=128,
        # Large weights and steps: otherwise greedy decoding repeats one token and the state hardly matters.
        initializer_range=0.1, time_step_min=0.01,
        moe_intermediate_size=64, moe_shared_expert_intermediate_size=64)
    NemotronHForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


if __name__ == "__main__":
    write(Path(sys.argv[1]))

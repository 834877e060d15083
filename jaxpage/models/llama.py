"""The LLaMA family in Flax Linen.

Parameters (a plain dict; every matrix is [out, in]), for hidden D, F intermediate, N query heads,
K KV heads, G = N / K, H head dim, V vocabulary:

    embed/embedding                              [V, D]
    layers_i/input_norm/scale                    [D]
    layers_i/attention/qkv/kernel                [K, G + 2, H, D]   per KV head: its G queries, k, v
    layers_i/attention/qkv/bias                  [K, G + 2, H]      only with attention_bias
    layers_i/attention/out/kernel                [D, N * H]         query head n = k * G + g
    layers_i/attention/out/bias                  [D]                only with attention_bias
    layers_i/post_attention_norm/scale           [D]
    layers_i/mlp/gate_up/kernel                  [2, F, D]          gate, up
    layers_i/mlp/gate_up/bias                    [2, F]             only with mlp_bias
    layers_i/mlp/down/kernel                     [D, F]
    layers_i/mlp/down/bias                       [D]                only with mlp_bias
    final_norm/scale                             [D]
    lm_head/kernel                               [V, D]             absent when tied to embed

Grouping qkv by KV head (and gate with up) makes each a single matrix product today and a single
axis to shard over later.
"""

"""Quality of a model whose KV cache was rounded: logits with and without, beside a control."""

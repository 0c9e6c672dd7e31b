"""Attention without a plan's mask, for tests that call a model on plain tokens or against a cache."""

from torch.nn import functional as F


class _Full:
    """In the place of a plan: every query sees every key that it is given."""

    def attend(self, module, query, key, value, scale, window):
        if window is not None:  # the clean keys that the block's first query would see, and the block
            first = max(0, key.shape[2] - query.shape[2] - (window - 1))
            key, value = key[:, :, first:], value[:, :, first:]
        out = F.scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=True)
        return out.transpose(1, 2), None


FULL = _Full()

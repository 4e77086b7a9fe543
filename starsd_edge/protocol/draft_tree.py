"""A DRAFT back into a tree, if it is one and still ours."""

from __future__ import annotations

import numpy as np

from starsd_edge.decoding.tree import NO_PARENT, DraftTree
from starsd_edge.errors import RemoteProtocolError
from starsd_edge.protocol.history import History
from starsd_edge.protocol.messages import Draft

__all__ = ["followed_tree"]

ROOT_PARENT = np.array([NO_PARENT], np.int32)


def followed_tree(draft: Draft, history: History, vocab_size: int) -> DraftTree | None:
    """The tree of `draft` if what was committed since leaves something of it, else None.

    Raises RemoteProtocolError when it is no tree, or has tokens beyond the vocabulary.
    """
    base_len = draft.head.base_len
    if base_len > history.committed_len or history.crc(base_len) != draft.head.prefix_crc:
        return None
    if len(draft.tokens) and int(draft.tokens.max()) >= vocab_size:
        raise RemoteProtocolError(f"draft token {draft.tokens.max()}; the vocabulary has {vocab_size}")
    since = history.tokens(base_len - 1, history.committed_len)  # the root, and what was committed behind it
    try:
        tree = DraftTree(
            np.concatenate([since[:1], draft.tokens]), np.concatenate([ROOT_PARENT, draft.parents]), base_len
        )
    except ValueError as error:
        raise RemoteProtocolError(f"not a tree: {error}") from error
    rest = tree.descend(since[1:].tolist())
    return tree if rest is not None and len(rest) > 1 else None

"""A DRAFT back into a tree, if it is one and still ours."""

from __future__ import annotations

from starsd_edge.decoding.tree import DraftTree
from starsd_edge.errors import RemoteProtocolError
from starsd_edge.protocol.history import History
from starsd_edge.protocol.largest import largest
from starsd_edge.protocol.messages import Draft

__all__ = ["rebuild_tree", "still_leads_on"]


def rebuild_tree(draft: Draft, history: History, vocab_size: int) -> DraftTree | None:
    """The tree of `draft`, its root put back; None when it is for a prefix that is not ours any more.

    Raises RemoteProtocolError when it is no tree, or has tokens beyond the vocabulary.
    """
    base_len = draft.head.base_len
    if base_len > history.committed_len or history.crc(base_len) != draft.head.prefix_crc:
        return None
    if len(draft.tokens) and largest(draft.tokens) >= vocab_size:
        raise RemoteProtocolError(f"draft token {draft.tokens.max()}; the vocabulary has {vocab_size}")
    try:
        return DraftTree.below(history.token(base_len - 1), draft.tokens, draft.parents, base_len)
    except ValueError as error:
        raise RemoteProtocolError(f"not a tree: {error}") from error


def still_leads_on(tree: DraftTree, history: History) -> bool:
    """Whether something is left of `tree` after what was committed since it was asked for."""
    if tree.base_len == history.committed_len:
        return len(tree) > 1
    rest = tree.descend(history.tokens(tree.base_len, history.committed_len).tolist())
    return rest is not None and len(rest) > 1
